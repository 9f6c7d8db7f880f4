"""What ranks that cannot or may not set up a channel together are told."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.processes import Outcome, run, run_outcomes
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import RendezvousError

FITTING = {"bound": 1, "slot_bytes": 1024}


def create(rank: int, arguments: Sequence[Mapping[str, Any]]) -> None:
    BoundedLagChannel(dist.group.WORLD, **arguments[rank]).close()


def create_patched(rank: int, target: str, change: Mapping[str, Any]) -> None:
    """Creates a channel with something changed on rank 1."""
    with mock.patch(target, **change) if rank == 1 else nullcontext():
        BoundedLagChannel(dist.group.WORLD, deadline=30, **FITTING).close()


def check_all(outcomes: Sequence[Outcome], error: str, *texts: str) -> None:
    for outcome in outcomes:
        assert outcome.error == error, outcome
        for text in texts:
            assert text in outcome.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bound": -1}, "bound is -1, but must be a number of iterations from 0 (synchronous)"),
        ({"bound": 1.5}, "bound is 1.5, but must be"),
        ({"bound": True}, "bound is True, but must be"),
        ({"bound": 65537}, "bound is 65537, but must be"),
        ({"slot_bytes": 255}, "slot_bytes is 255, but a message header alone may take 256"),
        ({"deadline": 0}, "deadline is 0 s, but must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    check_all(run_outcomes(1, create, [FITTING | changed]), "ValueError", message)


@pytest.mark.parametrize(
    ("field", "values", "cure"),
    [
        ("bound", (1, 2), "Give every rank the same bound"),
        ("slot_bytes", (1024, 2048), "Give every rank the same slot_bytes"),
    ],
)
def test_arguments_that_differ_are_refused_on_all_ranks(
    field: str, values: tuple[int, int], cure: str
) -> None:
    arguments = [FITTING | {field: values[0]}, FITTING | {field: values[1]}, FITTING]
    check_all(
        run_outcomes(3, create, [a | {"name": "ids"} for a in arguments]),
        "RendezvousError",
        f"channel 'ids': {field} differs between ranks (ranks [0, 2]: {values[0]}; "
        f"ranks [1]: {values[1]}). {cure}",
    )


@pytest.mark.parametrize(
    ("target", "change", "texts"),
    [
        (
            "torchrec_bls.collective.channel.metadata.version",
            {"return_value": "0.0.9"},
            ("package differs", "ranks [1]: 0.0.9", "Install one version of torchrec-bls"),
        ),
        (
            "torchrec_bls._native.WIRE_VERSION",
            {"new": 99},
            ("wire_version differs", "ranks [1]: 99", "Install one version of torchrec-bls"),
        ),
        (
            "torchrec_bls.collective.channel.host_identity",
            {"return_value": "elsewhere"},
            ("host differs", "ranks [1]: elsewhere", "one host and one PID namespace"),
        ),
    ],
    ids=["package", "wire version", "host"],
)
def test_ranks_that_do_not_fit_together_are_refused(
    target: str, change: Mapping[str, Any], texts: Sequence[str]
) -> None:
    check_all(run_outcomes(2, create_patched, target, change), "RendezvousError", *texts)


class LargerGroup:
    """A process group that counts one rank more than there are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def size(self) -> int:
        return self._group.size() + 1


def create_in_groups_of_different_size(rank: int) -> None:
    group = dist.group.WORLD
    BoundedLagChannel(LargerGroup(group) if rank == 1 else group, deadline=2, **FITTING)


def test_another_world_size_is_refused() -> None:
    right, wrong = run_outcomes(2, create_in_groups_of_different_size)
    assert right.error == wrong.error == "RendezvousError"
    assert "world_size differs between ranks (ranks [0]: 2; ranks [1]: 3)" in right.message
    assert "ranks [2] did not come to phase 'terms'" in wrong.message


def create_except_on_the_last(rank: int) -> None:
    if rank != dist.get_world_size() - 1:
        BoundedLagChannel(dist.group.WORLD, deadline=2, name="embeddings", **FITTING)


def test_a_rank_that_never_comes_is_named() -> None:
    *waiting, last = run_outcomes(3, create_except_on_the_last)
    assert last.error is None
    check_all(
        waiting,
        "RendezvousError",
        "channel 'embeddings' on rank ",
        "ranks [2] did not come to phase 'terms' within 2 s",
        "Every rank of the group must create the channel",
    )


def test_a_ring_larger_than_the_shared_memory_is_refused_with_the_cure() -> None:
    check_all(
        run_outcomes(2, create, [{"bound": 1, "slot_bytes": 1 << 42}] * 2),
        "RendezvousError",
        "no space in /dev/shm for 2 x 4 slots of 4398046511232 bytes on rank ",
        "33554433 MiB needed",
        "Lower the bound, slot_bytes or the batch, or enlarge it",
        "--shm-size",
    )


@pytest.mark.parametrize("target", ["ShmTransport", "ShmTransport.connect"])
def test_a_failure_of_one_rank_is_told_to_the_others(target: str) -> None:
    change = {"side_effect": RendezvousError("no space in /dev/shm for a test")}
    outcomes = run_outcomes(3, create_patched, f"torchrec_bls._native.{target}", change)
    assert outcomes[1].message == "no space in /dev/shm for a test"
    check_all(
        [outcomes[0], outcomes[2]],
        "RendezvousError",
        "rank 1 could not set it up: no space in /dev/shm for a test",
    )


def create_many(rank: int) -> None:
    for bound in range(20):
        BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=256).close()


def test_channels_can_be_made_one_after_the_other() -> None:
    run(2, create_many)
