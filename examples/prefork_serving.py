"""A pre-fork server: one process loads the tables, and the children that it forks serve them.

    python examples/prefork_serving.py --children 4 --versions 20

All children read the one copy of the tables that their parent has loaded, and follow what it
publishes. They compare each answer, bit by bit, with that of the unsharded model. Child 0 calls
sys.exit halfway, which the others do not notice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from dlrm import DlrmOnBatches, build_model, shard_model
from torch import nn

from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, attach, offer, publish
from torchrec_bls.datasets import SyntheticDataset

ROWS, DIM = [500] * 25 + [2_000], 32
BATCH = SyntheticDataset(rows_per_table=ROWS, batch_size=16, steps=1, seed=0).batch(0)
PAUSE_S = 0.002
DEADLINE_S = 120


def load() -> nn.Module:
    """Returns the model with its tables in shared memory. The only rank has all of them."""
    model = shard_model(
        build_model(ROWS, DIM, seed=1),
        BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct")),
        ranks=1,
    )
    model(BATCH)  # the first batch shares the tables
    return model


def answers_of(versions: int) -> list[torch.Tensor]:
    """Returns what the unsharded model of each version answers, version 1 first."""
    return [build_model(ROWS, DIM, seed=version)(BATCH) for version in range(1, versions + 1)]


def serve(
    model: nn.Module, child: int, answers: Sequence[torch.Tensor], served: int, stop_at: int
) -> None:
    """Answers in a child until the last version serves; writes a byte when a version does."""
    for version, answer in enumerate(answers, 1):
        while not torch.equal(got := model(BATCH), answer):
            before = answers[max(0, version - 2)]
            assert torch.equal(got, before), f"child {child}: an answer is of no version"
            time.sleep(PAUSE_S)
        os.write(served, b".")
        if version == stop_at:
            sys.exit()


def fork(
    model: nn.Module, child: int, answers: Sequence[torch.Tensor], stop_at: int
) -> tuple[int, int]:
    """Starts a child. Returns its process number, and a pipe with a byte for each version that it
    serves."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    signal.alarm(DEADLINE_S)
    try:
        serve(model, child, answers, writing, stop_at)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


def main() -> None:
    """Loads, forks, publishes, and waits for the children."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--children", type=int, default=4)
    parser.add_argument("--versions", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child has none of OpenMP's threads, and would wait for them
    torch.set_grad_enabled(False)
    signal.alarm(DEADLINE_S)
    parent = os.getpid()
    # A TemporaryDirectory would be removed by the first child that exits.
    folder = tempfile.mkdtemp()
    try:
        run(options.children, options.versions, folder)
    finally:
        if os.getpid() == parent:
            shutil.rmtree(folder)


def run(count: int, versions: int, folder: str) -> None:
    """Does all that the parent does."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    model, answers = load(), answers_of(versions)
    with offer(model, f"{folder}/tables"):  # before the fork: from here on the model follows
        halfway = versions // 2
        children = [fork(model, child, answers, 0 if child else halfway) for child in range(count)]
        for version in range(1, versions + 1):
            if version > 1:
                publish(model, dict(build_model(ROWS, DIM, seed=version).state_dict())).wait()
                model(BATCH)
            for child, (_, served) in enumerate(children):
                if child or version <= halfway:
                    assert os.read(served, 1) == b".", f"child {child} ended in version {version}"
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
        assert ends == [0] * count, ends
        reader = DlrmOnBatches(ROWS, DIM, tables_on="meta").eval()
        attach(reader, f"{folder}/tables")
        assert torch.equal(reader(BATCH), answers[-1])
    dist.destroy_process_group()
    print(f"{count} children served {versions} versions; child 0 ended after {halfway}")


if __name__ == "__main__":
    main()
