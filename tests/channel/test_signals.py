"""Signals during the calls of a channel: what their handlers raise ends the call, on all ranks."""

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import network_is_slow, slow_but
from torchrec_bls import BoundedLagChannel, _native
from torchrec_bls.errors import PoisonedError

# Far beyond the deadline of a run: whatever ends a wait, it is not this.
NEVER = 3600.0
LARGE = 100_000  # int64 numbers, which no slot has room for


def channel(bound: int = 0) -> BoundedLagChannel:
    return BoundedLagChannel(
        dist.group.WORLD, bound=bound, slot_bytes=4096, name="ids", deadline=NEVER
    )


def value_to_all(value: int, items: int = 1) -> list[list[torch.Tensor]]:
    return [[torch.full((items,), value)]] * dist.get_world_size()


def send_soon(number: signal.Signals, times: int = 1) -> None:
    def send() -> None:
        for _ in range(times):
            time.sleep(0.2)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


class PreemptedError(TimeoutError):
    """What a handler of the user raises, of a type that the channel's own errors have, too."""


def be_preempted(*_: object) -> None:
    raise PreemptedError("the node goes away")


def wait_forever(rank: int) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = channel()
    ids.post(value_to_all(rank))
    ids.wait().release()
    if rank == 1:
        signal.signal(signal.SIGTERM, be_preempted)
        ids.post(value_to_all(rank))
        send_soon(signal.SIGTERM)
        try:
            ids.wait()
        finally:
            store.set("struck", "")
    if rank == 2:
        store.wait(["struck"])
    ids.post(value_to_all(rank))
    ids.wait()


def test_what_a_handler_raises_ends_a_wait_and_all_ranks_are_told() -> None:
    outcomes = run_outcomes(3, wait_forever)
    assert outcomes[1].error == "PreemptedError", outcomes[1]
    assert outcomes[1].message == "the node goes away"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PoisonedError", outcome
        assert "because rank 1 failed: channel 'ids' on rank 1, sequence 1" in outcome.message
        assert "PreemptedError: the node goes away" in outcome.message


def handle_and_go_on(rank: int) -> int:
    store = dist.group.WORLD.get_group_store()
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: handled.append(0))
    ids = channel()
    for iteration in range(3):
        # The second is pulled.
        items = LARGE if iteration == 1 else 1
        if rank == 0:
            store.wait([f"{iteration} has come"])
        else:
            before = len(handled)
            send_soon(signal.SIGTERM, times=3)
            announce = partial(announce_after, before + 3, handled, store, f"{iteration} has come")
            threading.Thread(target=announce, daemon=True).start()
        ids.post(value_to_all(rank + iteration, items))
        with ids.wait() as arrival:
            for source in range(2):
                expected = value_to_all(source + iteration, items)[0][0]
                assert torch.equal(arrival.tensor(source, 0, torch.int64), expected)
    ids.close()
    return len(handled)


def announce_after(count: int, handled: list[int], store: dist.Store, key: str) -> None:
    while len(handled) < count:
        time.sleep(0.005)
    store.set(key, "")


@network_is_slow
@pytest.mark.usefixtures("transport")
def test_a_handler_that_returns_runs_during_the_wait_and_does_not_disturb_it() -> None:
    assert run(2, handle_and_go_on)[1] == 9


def wait_while_a_handler_closes(rank: int) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = channel()

    def close(*_: object) -> None:
        store.set("closing", "")
        ids.close()

    if rank == 1:
        signal.signal(signal.SIGTERM, close)
        send_soon(signal.SIGTERM)
    else:
        store.wait(["closing"])
    for _ in range(2):
        ids.post([[], []])
        ids.wait().release()


def test_a_handler_may_close_the_channel_that_waits() -> None:
    outcomes = run_outcomes(2, wait_while_a_handler_closes)
    assert outcomes[1].error == "ChannelClosedError", outcomes[1]
    assert outcomes[0].error == "PeerClosedError", outcomes[0]


class StruckAfter:
    """A native channel behind whose call a signal strikes."""

    def __init__(self, native: _native.Channel, name: str) -> None:
        self._native = native
        self._name = name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._native, name)
        if name != self._name:
            return method

        def then_struck(*arguments: Any) -> None:
            method(*arguments)
            raise KeyboardInterrupt

        return then_struck


def be_struck_behind(rank: int, action: str) -> None:
    ids = channel(bound=1)
    ids.post(value_to_all(rank))
    if rank == 1:
        native = ids.native
        ids.native = StruckAfter(native, action)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            ids.post(value_to_all(rank)) if action == "post" else ids.wait()
        ids.native = native
        # As if nothing had been: the next message would be taken for the one before.
        ids.post(value_to_all(rank))
    for _ in range(3):
        ids.wait().release()
        ids.post(value_to_all(rank))


@pytest.mark.parametrize("action", ["post", "wait"])
def test_a_call_that_was_done_unknown_to_its_caller_fails_all_ranks(action: str) -> None:
    for outcome in run_outcomes(2, be_struck_behind, action):
        assert outcome.error == "PoisonedError", outcome
        assert f"KeyboardInterrupt, right after a {action}" in outcome.message


def be_warned(rank: int) -> None:
    ids = channel()
    if rank == 1:
        with warnings.catch_warnings(), pytest.raises(UserWarning, match="larger messages"):
            warnings.simplefilter("error")
            ids.post(value_to_all(rank, LARGE))
    ids.post(value_to_all(rank))
    ids.wait().release()
    ids.post(value_to_all(rank))
    ids.wait()


def test_a_warning_that_is_an_error_does_not_shift_the_messages() -> None:
    for outcome in run_outcomes(2, be_warned):
        assert outcome.error == "PoisonedError", outcome
        assert "UserWarning: channel 'ids' on rank 1" in outcome.message


def interrupt_a_release(rank: int) -> None:
    ids = channel(bound=1)
    for value in (1, 2):
        ids.post(value_to_all(value))
    arrival = ids.wait()
    native = ids.native
    ids.native = StruckAfter(native, "release")  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        arrival.release()
    ids.native = native
    with pytest.raises(ValueError, match="were released"):
        arrival.tensor(1 - rank)
    arrival.release()  # which it is
    with ids.wait() as second:
        assert second.tensor(rank, 0, torch.int64).item() == 2
    ids.post(value_to_all(3))
    with ids.wait() as third:
        assert third.tensor(rank, 0, torch.int64).item() == 3


def test_an_interrupted_release_has_happened_or_not() -> None:
    run(2, interrupt_a_release)


def end_with_unread_messages(rank: int, how: str) -> str:
    store = dist.group.WORLD.get_group_store()
    ids: BoundedLagChannel | None = channel()
    assert ids is not None
    ids.post(value_to_all(rank, LARGE))
    if rank == 0:
        store.wait(["struck"])
        try:
            for _ in range(3):
                ids.wait().release()
                ids.post(value_to_all(rank, LARGE))
        except PoisonedError as error:
            return str(error)
        return "nothing"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    send_soon(signal.SIGINT)
    try:
        if how == "close":
            ids.close()
        else:
            del ids
            gc.collect()
            time.sleep(0)  # the interrupt is raised here at the latest
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    finally:
        store.set("struck", "")
    return "nothing"


@pytest.mark.parametrize("how", ["close", "del"])
@network_is_slow
@pytest.mark.usefixtures("transport")
def test_an_interrupt_while_a_channel_ends_stays_one(how: str) -> None:
    peer, struck = run(2, end_with_unread_messages, how)
    assert struck == "KeyboardInterrupt"
    assert "because rank 1 failed" in peer
    assert "KeyboardInterrupt" in peer


def wait_in_a_thread(rank: int) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = channel()
    ids.post(value_to_all(rank))
    if rank == 0:
        store.wait(["struck"])
        ids.wait().release()
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=lambda: ids.wait().release())
    thread.start()
    send_soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(NEVER)
    store.set("struck", "")
    thread.join()
    assert ids.native.released == 1


def test_the_wait_of_another_thread_goes_on() -> None:
    run(2, wait_in_a_thread)


def read_after(rank: int, end: str) -> None:
    ids: BoundedLagChannel | None = channel(bound=1)
    assert ids is not None
    for items in (100, LARGE):
        ids.post(value_to_all(7 + rank, items))
    views = []
    for items in (100, LARGE):
        arrival = ids.wait()
        for source in range(2):
            expected = value_to_all(7 + source, items)[0][0]
            views.append((arrival.tensor(source, 0, torch.int64), expected))
            views.append((arrival.parts(source)[0], expected))
    native = weakref.ref(ids.native)
    if end == "closed":
        ids.close()
    del ids, arrival
    gc.collect()
    dist.barrier()
    # Memory that was free would be used for these.
    others = [torch.full((items,), -1) for items in (100, LARGE) * 20]
    for view, expected in views:
        if isinstance(view, memoryview):
            view = torch.frombuffer(view, dtype=torch.int64)
        assert torch.equal(view, expected)
    dist.barrier()
    del others, view
    views.clear()
    assert native() is None


@pytest.mark.parametrize(
    ("transport", "end"),
    slow_but([("shm", "closed"), ("tcp", "gone")], product(("shm", "tcp"), ("closed", "gone"))),
    indirect=["transport"],
)
@pytest.mark.usefixtures("transport")
def test_views_keep_what_they_show(end: str) -> None:
    run(2, read_after, end)
