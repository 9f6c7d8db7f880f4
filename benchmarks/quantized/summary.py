"""What a study says: how accuracy changes, how surely, and how far sums alone are off."""

import math
from functools import cache
from itertools import product

import numpy as np
import torch

from benchmarks.harness.record import Record
from benchmarks.quantized.cells import BASELINE, CONTROL, collectives
from benchmarks.quantized.dlrm import Collectives

#: The paper accepts a fall of the accuracy by so many percent.
CRITERION = 0.02
#: How often gradients that do not change are summed.
SUMS = 20
_OF_TEST_SET = ("iterations", "test_rows", "click_rate", "bayes_accuracy", "bayes_loss")


def summarize(raw: Record) -> Record:
    """The record of a study, also of one that has not ended: each source's baseline and changes."""
    results = []
    for source in raw["settings"]["sources"]:
        trained = [each for each in raw["results"] if each["source"] == source["name"]]
        bases = {each["seed"]: each for each in trained if each["cell"] == BASELINE.key}
        if not bases:
            continue
        by_cell: dict[str, list[Record]] = {}
        for each in trained:
            if each["cell"] != BASELINE.key and each["seed"] in bases:
                by_cell.setdefault(each["cell"], []).append(each)
        one = next(iter(bases.values()))
        baseline = {name: one[name] for name in _OF_TEST_SET if name in one}
        baseline |= {name: [base[name] for base in bases.values()] for name in ("accuracy", "loss")}
        changes = {cell: change(of_cell, bases) for cell, of_cell in by_cell.items()}
        if CONTROL.key in by_cell:
            changes["control on labels"] = change(by_cell[CONTROL.key], bases, "_on_labels")
        results.append({"source": source["name"], "baseline": baseline, "changes": changes})
    return {**raw, "results": results, "compensation": errors_by_row()}


def change(results: list[Record], bases: dict[int, Record], suffix: str = "") -> Record:
    """Changes of a cell against the baselines of the same seeds, in percent of these (equation 2).

    Args:
        results: of the cell, one a seed.
        bases: the baselines' by seed.
        suffix: "" counts decisions by the probability that they are right, where that is known;
            "_on_labels" by the labels.

    Returns:
        accuracy: mean over the seeds. spread: standard deviation over the seeds, 0 with one.
        seed_error: standard error of the mean because of the seeds. test_error: standard error
        because of the finite test set, the same for all seeds. error: both. loss: mean change of
        the loss; None if one was not finite, the baseline's included. flipped: percent of the
        decisions that differ from the baseline's. seeds: how many.
    """
    of_bases = [bases[result["seed"]] for result in results]

    def of(name: str, them: list[Record] = results) -> np.ndarray:
        return np.array([each[name] for each in them], dtype=float)  # NaN for None

    accuracy = of(f"accuracy{suffix}", of_bases)
    changes = 100 * (of(f"difference{suffix}") / accuracy)
    spread = float(np.std(changes, ddof=1)) if len(results) > 1 else 0.0
    seed_error = spread / math.sqrt(len(results))
    test_error = float(np.mean(100 * (of(f"test_error{suffix}") / accuracy)))
    loss = float(np.mean(100 * (of("loss") / of("loss", of_bases) - 1)))
    return {
        "accuracy": float(np.mean(changes)),
        "spread": spread,
        "seed_error": seed_error,
        "test_error": test_error,
        "error": math.hypot(seed_error, test_error),
        "loss": loss if math.isfinite(loss) else None,
        "flipped": float(np.mean(100 * of("flipped"))),
        "seeds": len(results),
    }


@cache
def errors_by_row() -> list[Record]:
    """The errors of 32 nodes with each codec, in a ring and by recursive doubling, with and
    without compensation."""
    names = product(("ring", "RD"), ("uint8", "uint4", "uint2"), ("", " EC"))
    rows = [f"{codec} {algorithm}{compensated}" for algorithm, codec, compensated in names]
    return [{"row": row, "errors": relative_errors(collectives(32, row))} for row in rows]


def relative_errors(how: Collectives) -> list[float]:
    """Sums the same normal values of each node again and again: the RMS errors of the first, fifth
    and last sum and of the mean of all, relative to the exact sum's RMS."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(how.nodes, how.nodes, 64, generator=generator)
    error = torch.zeros_like(values) if how.compensated else None
    sums = [how.sum_gradients(values, error) for _ in range(SUMS)]
    mean = sum(each / SUMS for each in sums)
    exact = values.sum(0)
    compared = (sums[0], sums[4], sums[-1], mean)
    return [((found - exact).norm() / exact.norm()).item() for found in compared]
