"""Tables 2, 3 and 4 of Quantized Collectives: what quantized messages cost a DLRM in accuracy.

A study that was stopped goes on where it was.
"""

from functools import partial

import torch

from benchmarks.harness import record
from benchmarks.harness.record import Record
from benchmarks.quantized import trainings
from benchmarks.quantized.cells import BASELINE, CELLS, Cell
from benchmarks.quantized.data import Source, load
from benchmarks.quantized.dlrm import DLRM, Training
from benchmarks.quantized.page import plot, section, summarize

# Nine tenths of the time are for the planted clicks.
ITERATIONS = 112
SEEDS = 4
BATCH_SIZE = 1024
# Cells of many nodes cost the most, and small sets tell little about them.
MOST_NODES = {"ml-100k": 32, "criteo-tiny": 1}


def _fit(source: Source, cell: Cell, seed: int) -> tuple[Record, torch.Tensor]:
    """Trains a cell; it is tested without quantization."""
    split = load(source, seed)
    model = DLRM(split.rows_per_table, seed=seed)
    training = Training(model, cell.collectives)
    batches = trainings.batches(split.train, source.batch_size)
    losses = [trainings.finite(training.step(*batch)) for batch in batches]
    with torch.no_grad():
        batches = trainings.batches(split.test, trainings.TEST_BATCH)
        logits = [model(dense, model.look_up(ids)) for dense, ids, _ in batches]
    facts = {"training_losses": losses[:: max(1, len(losses) // 16)], "iterations": len(losses)}
    return facts, torch.cat(logits)


train = partial(trainings.compared, _fit, BASELINE)


def main() -> None:
    parser = trainings.parser("quantized", __doc__, "two iterations, one seed, 32 nodes", 10_000)
    options = parser.parse_args()
    found = trainings.sources(options, ITERATIONS, BATCH_SIZE)
    seeds = 1 if options.quick else SEEDS
    tasks = [
        (source, cell, seed)
        for source in found
        for seed in range(seeds)
        for cell in CELLS
        if cell.collectives.nodes <= (32 if options.quick else MOST_NODES.get(source.name, 128))
    ]
    empty = {"benchmark": "quantized", "environment": record.environment(), "results": []}
    empty["settings"] = {"seeds": seeds, "sources": trainings.settings(found)}
    trainings.run(record.Resumable(options.json, empty, summarize), tasks, options.workers, train)
    summary = record.read(options.json)
    print(section(summary))
    plot(options.json.with_suffix(".png"), summary)


if __name__ == "__main__":
    main()
