"""Channels where memory for a message runs out."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_outcomes
from torchrec_bls import BoundedLagChannel

LARGE = 64 << 20  # bytes


def forbid_more_memory() -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = in_use + LARGE // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_out_of_memory(rank: int, when: str) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = BoundedLagChannel(
        dist.group.WORLD, slot_bytes=256, name="ids", deadline=30, transport="tcp"
    )
    to_other = [torch.ones(LARGE, dtype=torch.uint8)]
    if rank == 0:
        ids.post([[], to_other])
        store.wait(["failed"])
        return
    try:
        if when == "sending":
            forbid_more_memory()
            ids.post([to_other, []])
        ids.post([[], []])
        forbid_more_memory()
        ids.wait()
    finally:
        store.set("failed", "")


@pytest.mark.parametrize("when", ["sending", "reading"])
def test_a_large_message_without_memory_is_an_error_with_a_cure(when: str) -> None:
    _, failing = run_outcomes(2, run_out_of_memory, when)
    assert failing.error == "TransportError", failing
    assert f"no memory for {LARGE} bytes of messages" in failing.message
    assert "use smaller ones, or smaller slots, or raise the limit of memory" in failing.message
