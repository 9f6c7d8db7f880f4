"""A forked child has none of the connections that a channel made."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel


def sockets() -> set[str]:
    """The identity of each socket of this process."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(str(path.readlink()))
    return {each for each in found if each.startswith("socket:")}


def new_in_child(before: set[str]) -> int:
    """Returns how many sockets a forked child has that are not among those."""
    child = os.fork()
    if child == 0:
        os._exit(len(sockets() - before))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def new_with_a_channel(rank: int) -> tuple[int, int]:
    """Returns how many sockets a channel adds here, and in a forked child."""
    dist.barrier()
    before = sockets()
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024):
        dist.barrier()
        return len(sockets() - before), new_in_child(before)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_child_has_the_sockets_from_before_only() -> None:
    for here, in_child in run(3, new_with_a_channel):
        assert here >= 2  # one to each peer
        assert in_child == 0
