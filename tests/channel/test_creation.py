"""What ranks that cannot or may not set up a channel together are told."""

import gc
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import network_is_slow
from torchrec_bls import BoundedLagChannel, _native
from torchrec_bls.collective.transport import set_up
from torchrec_bls.errors import RendezvousError
from torchrec_bls.processes import Outcome

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
        *(
            (
                {"slot_bytes": large},
                f"slot_bytes is {large}, but must be a number of bytes, at most",
            )
            for large in ((1 << 40) + 1, 1 << 62, 1 << 63, (1 << 64) - 1, 1 << 64)
        ),
        ({"slot_bytes": 4096.0}, "slot_bytes is 4096.0, but must be a number of bytes"),
        ({"slot_bytes": 255}, "slot_bytes is 255, but a message header alone may take 256"),
        ({"deadline": 0}, "deadline is 0 s, but must be positive"),
    ],
)
@network_is_slow
@pytest.mark.usefixtures("transport")
def test_arguments_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    check_all(run_outcomes(1, create, [FITTING | changed]), "ValueError", message)


@pytest.mark.parametrize(
    ("transport", "target"),
    [("shm", "ShmTransport"), ("shm", "ShmTransport.connect"), ("tcp", "TcpTransport")],
    indirect=["transport"],
)
def test_a_failure_of_one_rank_is_told_to_the_others(target: str) -> None:
    change = {"side_effect": RendezvousError("no memory for a test")}
    outcomes = run_outcomes(3, create_patched, f"torchrec_bls._native.{target}", change)
    check_all([outcomes[1]], "RendezvousError", "on rank 1: no memory for a test")
    check_all(
        [outcomes[0], outcomes[2]],
        "RendezvousError",
        "rank 1 could not set it up: ",
        "no memory for a test",
    )


def connect_in_turn(rank: int) -> None:
    """Rank 1 fails to connect, and has closed its memory before the others try."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    connect = _native.ShmTransport.connect
    tried = ["rank 0 has tried", "rank 2 has tried"]

    def connect_late(transport: _native.ShmTransport, addresses: Any) -> None:
        if rank == 1:
            raise RendezvousError("no memory for a test")
        store.wait(["rank 1 is gone"], timedelta(seconds=30))
        try:
            connect(transport, addresses)
        finally:  # with its own memory there until the other one has tried as well
            store.set(f"rank {rank} has tried", "")
            store.wait(tried, timedelta(seconds=30))

    with mock.patch("torchrec_bls._native.ShmTransport.connect", connect_late):
        try:
            BoundedLagChannel(dist.group.WORLD, deadline=30, **FITTING)
        except RendezvousError as error:
            message = str(error)
    gc.collect()
    if rank == 1:
        store.set("rank 1 is gone", "")
        # Whatever it opened now could get the number of the descriptor that the others look for.
        store.wait(tried, timedelta(seconds=30))
    raise RendezvousError(message)


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_failure_that_follows_from_another_names_that_one() -> None:
    outcomes = run_outcomes(3, connect_in_turn)
    for outcome in (outcomes[0], outcomes[2]):
        check_all(
            [outcome],
            "RendezvousError",
            "rank 1: cannot open shared memory",
            "rank 1 could not set it up: ",
            "no memory for a test",
        )


def be_interrupted(rank: int, where: str) -> None:
    """Rank 1 waits for the others, which come after it was struck."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store().clone()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait_or_be_struck() -> None:
        if rank == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            store.wait(["struck"])

    # Whatever ends the wait of rank 1, it is not its deadline.
    deadline = 3600.0 if rank == 1 else 3.0
    connect = set_up.connected

    def connect_late(*arguments: Any) -> Any:
        wait_or_be_struck()
        return connect(*arguments)

    try:
        if where == "rendezvous":
            wait_or_be_struck()
            BoundedLagChannel(dist.group.WORLD, deadline=deadline, **FITTING)
        else:
            with mock.patch.object(set_up, "connected", connect_late):
                BoundedLagChannel(dist.group.WORLD, deadline=deadline, transport="tcp", **FITTING)
    finally:
        store.set("struck", "")


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.parametrize("where", ["rendezvous", "connecting"])
@pytest.mark.usefixtures("transport")
def test_an_interrupt_ends_the_creation(where: str) -> None:
    outcomes = run_outcomes(3, be_interrupted, where)
    check_all([outcomes[1]], "KeyboardInterrupt")
    told = "rank 1 could not set it up: channel 'channel' on rank 1: KeyboardInterrupt"
    check_all([outcomes[0], outcomes[2]], "RendezvousError", told)


def create_many(rank: int) -> None:
    for bound in range(20):
        BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=256).close()


def test_channels_can_be_made_one_after_the_other() -> None:
    run(2, create_many)


def count_keys(rank: int) -> int:
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()

    def keys_after(channels: int) -> int:
        for _ in range(channels):
            BoundedLagChannel(dist.group.WORLD, **FITTING).close()
        dist.barrier()
        keys = store.num_keys()
        dist.barrier()
        return keys

    first = keys_after(1)
    return keys_after(10) - first


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_further_channels_of_a_name_leave_nothing_more_in_the_store() -> None:
    assert run(2, count_keys) == [0, 0]


def test_slots_that_no_memory_holds_are_refused() -> None:
    outcomes = run_outcomes(2, create, [{"slot_bytes": 1 << 40}] * 2)
    check_all(outcomes, "RendezvousError", "no ")


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_slots_whose_bytes_cannot_be_counted_are_refused() -> None:
    arguments = {"slot_bytes": 1 << 40, "bound": 65536}
    outcomes = run_outcomes(2, create, [arguments] * 2)
    check_all(outcomes, "ValueError", "2 x 131074 slots of", "lower slot_bytes, the bound or")


def local_ranks(rank: int) -> int:
    """Returns how many ranks on its host a channel counts, where two are on each."""
    with (
        mock.patch("torchrec_bls.collective.channel.host_identity", lambda: f"host {rank // 2}"),
        mock.patch("torchrec_bls._native.Channel", wraps=_native.Channel) as made,
        BoundedLagChannel(dist.group.WORLD, transport="tcp", **FITTING),
    ):
        return int(made.call_args.args[7])


def test_only_ranks_of_this_host_compete_for_its_cpus() -> None:
    assert run(3, local_ranks) == [2, 2, 1]
