"""What the end of a process counts on inside torch and gloo: the names of their threads."""

import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls.collective.transport import gloo_threads


def threads_of_a_group(rank: int) -> tuple[int, int]:
    """Returns how many threads move bytes, and how many complete calls."""
    dist.all_reduce(torch.ones(1))
    return len(gloo_threads.loop_threads()), len(gloo_threads.calling_threads())


def test_threads_of_a_group_are_found_by_their_names() -> None:
    for moving, completing in run(2, threads_of_a_group):
        assert completing
        assert moving or torch.__version__ < "2.13", "gloo of torch 2.12 does not name them"
