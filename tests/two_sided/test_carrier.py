"""Which process group moves the slots of transport c10d."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.transport.rounds import other_carrier

ITERATIONS, BOUND = 6, 1


class OtherGroup(dist.ProcessGroup):
    """Stands for a group whose backend for CPU tensors is not gloo, by a gloo that it hides."""

    def __init__(self, given: Any, _: object) -> None:
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg]
        self._store = given.store
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("hidden", given.store),
            given.group_rank,
            given.group_size,
            timeout=given.timeout,
        )
        self.rounds = 0

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return "other"

    def get_group_store(self) -> dist.Store:
        return self._store

    def alltoall_base(self, *arguments: Any) -> Any:
        self.rounds += 1
        return self._gloo.alltoall_base(*arguments)


def exchange(group: dist.ProcessGroup | None) -> None:
    with BoundedLagChannel(
        group, bound=BOUND, slot_bytes=256, deadline=30, transport="c10d"
    ) as channel:
        for iteration in range(ITERATIONS + BOUND):
            if iteration < ITERATIONS:
                channel.post(messages(channel.rank, iteration, channel.world_size))
            if iteration >= BOUND:
                with channel.wait() as arrival:
                    for source in range(channel.world_size):
                        wanted = messages(source, iteration - BOUND, 1)[0][0]
                        assert torch.equal(arrival.tensor(source, 0, torch.int64), wanted)


def messages(rank: int, iteration: int, world_size: int) -> list[list[torch.Tensor]]:
    items = 1000 if iteration == 2 else 3  # which do not fit a slot, and do
    return [[torch.full((items,), 100 * rank + iteration)]] * world_size


def exchange_over_another_backend(rank: int) -> int:
    dist.Backend.register_backend("other", OtherGroup, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(backend="other")
    exchange(group)
    return int(group.rounds)


def test_a_backend_that_is_not_gloo_moves_the_slots_itself() -> None:
    assert run(3, exchange_over_another_backend) == [ITERATIONS] * 3


def finds_another_carrier(rank: int) -> bool:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo")
    assert not isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    return other_carrier(group) is not None


@pytest.mark.smoke
def test_gloo_with_checks_of_torch_is_gloo() -> None:
    # They wait for all ranks in each call, and a post may not.
    assert run(2, finds_another_carrier) == [False, False]
