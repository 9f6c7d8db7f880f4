"""One process of examples/supervised_serving.py: a rank, a rank's replacement, or a reader.

It answers batches until it is told to end. It checks each
answer and prints a line of JSON about it.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time

import torch
import torch.distributed as dist
from dlrm import DlrmOnBatches, build_model, shard_model
from torch import nn

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    attach,
    offer,
    publish,
    serving_state,
    version_of,
)
from torchrec_bls.datasets import SyntheticDataset
from torchrec_bls.errors import BLSError

ROWS = [5_000] * 25 + [20_000]  # the largest table is cut by rows
DIM, BATCH, STEPS, PAUSE_S = 32, 16, 50, 0.01
IMPORTED_AT = time.monotonic()


def seed_of(version: str) -> int:
    """Returns the seed of a version: its name, and 1 for the weights that are loaded first."""
    return int(version) if version.isdigit() else 1


def weights_of(version: str) -> dict[str, torch.Tensor]:
    """Returns the weights of a version. A real program loads what its training has saved."""
    return dict(build_model(ROWS, DIM, seed=seed_of(version)).state_dict())


class Answers:
    """What the unsharded model answers in each version."""

    def __init__(self, batches: SyntheticDataset) -> None:
        self._batches = batches
        self._models: dict[str, DlrmOnBatches] = {}

    def check(self, answer: torch.Tensor, version: str, step: int) -> None:
        """Compares an answer bit by bit."""
        if version not in self._models:
            self._models[version] = build_model(ROWS, DIM, seed=seed_of(version))
        expected = self._models[version](self._batches.batch(step))
        if not torch.equal(answer, expected):
            raise AssertionError(f"step {step} has a wrong answer in version {version}")


def make_model(options: argparse.Namespace) -> nn.Module:
    """Loads the model with the other ranks, or attaches to one that serves it."""
    if options.attach is None:
        group = f"file://{options.folder}/group"
        dist.init_process_group(
            "gloo", init_method=group, rank=options.rank, world_size=options.ranks
        )
        sharder = BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct", deadline=60.0))
        return shard_model(build_model(ROWS, DIM, seed=1), sharder, options.ranks)
    model = DlrmOnBatches(ROWS, DIM, tables_on="meta").eval()
    *others, last = options.attach
    for path in others:
        try:
            attach(model, path, owner=options.rank)
            return model
        except BLSError as error:  # that one may have died meanwhile
            print(f"{options.name}: {error}", file=sys.stderr)
    attach(model, last, owner=options.rank)
    return model


def serve(options: argparse.Namespace) -> None:
    """Answers until it is told to end, from step `options.first` on."""
    model = make_model(options)
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: [orders.put(line) for line in sys.stdin], daemon=True).start()
    seed = 0 if options.rank is None else options.rank
    batches = SyntheticDataset(rows_per_table=ROWS, batch_size=BATCH, steps=STEPS, seed=seed)
    answers, step = Answers(batches), options.first
    while True:
        answer = model(batches.batch(step % STEPS))
        said = {"step": step, "version": version_of(model)}
        if step == options.first:
            said["start_s"] = round(time.monotonic() - IMPORTED_AT, 3)
            offered = offer(model, f"{options.folder}/{options.name}")
        answers.check(answer, version_of(model), step % STEPS)
        print(json.dumps(said | {"without": serving_state(model).owners_gone}), flush=True)
        step += 1
        time.sleep(PAUSE_S)
        try:
            order = orders.get_nowait().split()
        except queue.Empty:
            continue
        if order == ["end"]:
            offered.close()
            return
        publish(model, weights_of(order[1]), version=order[1])


def main() -> None:
    """Reads the command line of examples/supervised_serving.py."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--attach", nargs="+")
    parser.add_argument("--first", type=int, default=0)
    torch.set_num_threads(1)
    with torch.no_grad():
        serve(parser.parse_args())


if __name__ == "__main__":
    main()
