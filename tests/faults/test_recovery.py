"""After a failure ranks can go on in a new group, and what was finished before is intact."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.paths import ROOT
from tests.processes import run, run_outcomes
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import BLSError

ITERATIONS, BOUND, KILLED_AT = 12, 1, 6


def form_group(store: dist.Store, generation: int, rank: int, world: int) -> None:
    """Makes a group of the processes that are left, with keys of its own in the store."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"generation {generation}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )


def first_unfinished(folder: Path) -> int:
    finished = torch.tensor(len(list(folder.iterdir())))
    dist.all_reduce(finished, dist.ReduceOp.MIN)
    return int(finished)


def work(folder: Path, killed: int | None = None) -> int:
    """Runs what is not finished, saves every result and returns where it began."""
    folder.mkdir(exist_ok=True)
    rank, world, first = dist.get_rank(), dist.get_world_size(), first_unfinished(folder)
    with BoundedLagChannel(
        dist.group.WORLD, bound=BOUND, slot_bytes=256, name="exchange", deadline=30
    ) as channel:
        for posted in range(first, ITERATIONS + BOUND):
            if rank == killed and posted == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if posted < ITERATIONS:
                channel.post([[torch.tensor([1000 * rank + posted])]] * world)
            if posted - first >= BOUND:
                with channel.wait() as arrival:
                    got = [int(arrival.tensor(peer, 0, torch.int64)) for peer in range(world)]
                (folder / f"{posted - BOUND}").write_text(str(got))
    return first


def run_twice(process: int, folder: Path, second: Sequence[int]) -> int | None:
    """Runs processes 0, 1 and 2 as a group until 1 is killed, then the `second` ones as one."""
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    dist.destroy_process_group()
    if process < 3:
        form_group(store, 1, process, 3)
        with pytest.raises(BLSError, match="rank 1 died"):
            work(folder / str(process), killed=1)
        dist.destroy_process_group()
    form_group(store, 2, second.index(process), len(second))
    # The process that stands for a killed one goes on with its results.
    return work(folder / str(1 if process == 3 else process))


def results(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*/*")}


def work_undisturbed(rank: int, folder: Path) -> int:
    return work(folder / str(rank))


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced rank", "one rank less"])
def test_survivors_go_on(tmp_path: Path, replaced: bool) -> None:
    for name in ("undisturbed", "recovered"):
        (tmp_path / name).mkdir()
    run(3, work_undisturbed, tmp_path / "undisturbed")
    expected = results(tmp_path / "undisturbed")
    assert len(expected) == 3 * ITERATIONS
    second = [0, 3, 2] if replaced else [0, 2]
    outcomes = run_outcomes(
        4 if replaced else 3, run_twice, tmp_path / "recovered", second, deadline=60
    )
    assert outcomes[1].error == "ProcessDied", outcomes[1]
    firsts = {outcomes[process].value for process in second}
    assert len(firsts) == 1, outcomes
    (first,) = firsts
    assert KILLED_AT - 2 * BOUND <= first <= KILLED_AT
    recovered = results(tmp_path / "recovered")
    if replaced:
        assert recovered == expected
        return
    for path, text in recovered.items():
        process, iteration = path.split("/")
        if process == "1" or int(iteration) < first:
            assert text == expected[path]
        else:
            assert text == str([int(iteration), 1000 + int(iteration)])


def start_example(out: Path, *arguments: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "elastic_recovery.py"), "--out", str(out), *arguments]
    return subprocess.Popen(
        [*torchrun, "--standalone", "--max-restarts", "1", *example],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish_example(process: subprocess.Popen[str]) -> int:
    """Returns how many iterations it found finished at its end."""
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    (first,) = re.findall(r"the results of the first (\d+) were there", said)
    return int(first)


@pytest.mark.slow
def test_elastic_restart_keeps_what_was_finished(tmp_path: Path) -> None:
    undisturbed = start_example(tmp_path / "undisturbed")
    recovered = start_example(tmp_path / "recovered", "--kill", "1:12")
    assert finish_example(undisturbed) == 0
    assert 0 < finish_example(recovered) <= 12
    for rank in ("rank0", "rank1"):
        for iteration in range(20):
            path = f"{rank}/{iteration}.pt"
            expected = torch.load(tmp_path / "undisturbed" / path)
            assert torch.equal(torch.load(tmp_path / "recovered" / path), expected), path
