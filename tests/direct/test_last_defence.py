"""Threads that serve and hand over go on, whatever goes wrong in them."""

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.direct import nodes, served
from tests.direct.nodes import until
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.processes import run
from torchrec_bls import attach, offer, publish, serving_state
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.errors import BLSError

DEADLINE = 30.0


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leaves none to this process."""
    gc.collect()  # what is freed later would leave some
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lack_descriptors(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    weights = weights_of(2)
    publish(model, weights_of(1), version="1").wait(DEADLINE)
    if rank == 0:
        own = publish(model, weights, version="2")
        serving_state(model)
        dist.barrier()
        with no_descriptors():
            dist.barrier()
            until(lambda: "ulimit -n" in serving_state(model).problem)
            state = serving_state(model)
            assert state.owners_gone == ()
            assert (state.serial, state.announced_serial) == (1, 3)
            dist.barrier()
        own.wait(DEADLINE)
    else:
        dist.barrier()
        dist.barrier()
        own = publish(model, weights, version="2")
        dist.barrier()
        own.wait(DEADLINE)
    check_serves(model, 3)
    dist.barrier()


def check_serves(model: object, serial: int) -> None:
    state = serving_state(model)  # type: ignore[arg-type]
    assert (state.announced_serial, state.problem) == (serial, "")


def test_a_lack_of_descriptors_ends_nothing() -> None:
    run(2, lack_descriptors)


def fail_to_look(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    look = Follower.look

    def fail(_: Follower) -> bool:
        raise RuntimeError("something else")

    serving_state(model)
    Follower.look = fail  # type: ignore[method-assign]
    until(lambda: serving_state(model).problem == "RuntimeError: something else")
    Follower.look = look  # type: ignore[method-assign]
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 2
    check_serves(model, 2)


def test_a_thread_that_follows_survives_any_exception() -> None:
    run(1, fail_to_look)


def lack_threads(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "torchrec_bls hand-over":
            raise RuntimeError("can't start new thread")
        start(thread)

    with offer(model, f"{folder}/socket") as offered:
        threading.Thread.start = fail  # type: ignore[method-assign]
        with pytest.raises(BLSError):
            attach(nodes.bare_model(), offered.path, deadline=2.0)
        threading.Thread.start = start  # type: ignore[method-assign]
        # The thread hangs up before it says why.
        until(lambda: offered.problem == "RuntimeError: can't start new thread")
        joined = nodes.bare_model()
        attach(joined, offered.path, deadline=DEADLINE)
        until(lambda: offered.problem == "")
    check(joined, batches, expected, 0)


def test_a_lack_of_threads_costs_an_offer_one_process(tmp_path: Path) -> None:
    run(1, lack_threads, str(tmp_path))
