"""What the end of a process counts on inside torch and gloo: the names of their threads."""

import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls.collective import gloo_groups


def calling_threads(rank: int) -> int:
    dist.all_reduce(torch.ones(1))
    return len(gloo_groups.calling_threads())


def test_threads_of_a_group_are_found_by_their_name() -> None:
    assert all(run(2, calling_threads))
