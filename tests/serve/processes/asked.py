"""A service that is asked all the while, by callers that count every answer."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from tests.direct.nodes import DEADLINE, until
from tests.serve.asking import Answered, Refused, by_binary, by_grpc, by_json, drawn
from tests.serve.running import Running

CASE = drawn(3, 1)
#: A request has so many microseconds: what is late is no matter here. JSON is refused all the same
#: before it is read, if it has waited for as long as the service's own deadline.
PATIENT = {"timeout": 60_000_000}
#: Seconds that a zygote may take, which gives way to all others of this machine.
RENEWAL = 300.0


@dataclass
class Asked:
    """What became of requests.

    Attributes:
        answered: how many had the scores of the version that they name.
        late: how many were refused since they would have been late.
        cut: how many answers of gRPC a front has cut off. Behind HAProxy that may happen to one
            which a worker has written just before its death, see service-processes.md.
        lost: all others.
    """

    answered: int = 0
    late: int = 0
    cut: int = 0
    lost: list[Exception] = field(default_factory=list)


def version_in(answer: Answered) -> int:
    """Returns the version of an answer, which has the scores of that version."""
    version = int(answer.version.partition("@")[0].removeprefix("v"))
    for name, values in CASE.scores(version).items():
        np.testing.assert_allclose(answer.outputs[name], values, rtol=1e-5, atol=1e-3)
    return version


@contextmanager
def asked_all_the_while(service: Running) -> Iterator[Asked]:
    """Asks in three ways at once, again and again."""
    found, ends = Asked(), threading.Event()

    def ask(way: Callable[..., Answered]) -> None:
        while not ends.is_set():
            try:
                version_in(way(service, CASE.ragged(), parameters=PATIENT))
                found.answered += 1
            except Exception as error:
                if isinstance(error, Refused) and "would be late" in error.text:
                    found.late += 1
                elif isinstance(error, Refused) and error.status == "CANCELLED":
                    found.cut += 1
                else:
                    found.lost.append(error)
            time.sleep(0.005)  # others of this machine have work to do as well

    threads = [threading.Thread(target=ask, args=(way,)) for way in (by_json, by_binary, by_grpc)]
    for each in threads:
        each.start()
    try:
        before = found.answered
        yield found
        # Each of them has asked since.
        end = time.monotonic() + 60
        while found.answered < before + 20 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        ends.set()
        for each in threads:
            each.join()


def served(service: Running) -> int:
    """Returns the version that serves."""
    return version_in(by_json(service, CASE.ragged(), parameters=PATIENT))


def all_answer(service: Running) -> bool:
    """Returns whether both workers of a service answer."""
    # Without a front, one that dies meanwhile answers nothing.
    with suppress(AssertionError, OSError):
        return service.metric('torchrec_bls_workers{state="ready"}', of=min) == 2
    return False


def starts(service: Running, cause: str) -> float:
    """Returns how many workers have begun for a cause."""
    with suppress(AssertionError):  # there was none
        return service.metric(f'torchrec_bls_worker_starts_total{{cause="{cause}"}}', of=max)
    return 0


@contextmanager
def losing_workers(
    service: Running, cause: str = "death", times: int = 1, deadline: float = DEADLINE
) -> Iterator[None]:
    """Waits at the end until workers that the test loses have successors, and both answer."""
    wanted = starts(service, cause) + times

    def all_are_back() -> bool:
        with suppress(OSError):
            return starts(service, cause) == wanted and all_answer(service)
        return False

    yield
    until(all_are_back, deadline)


def lose(service: Running, name: str, number: int = signal.SIGKILL, cause: str = "death") -> None:
    """Sends a worker a signal, and waits for its successor."""
    with losing_workers(service, cause):
        os.kill(service.only(name), number)


def is_lost(error: Exception) -> bool:
    """Returns whether a request was lost: it got no answer at all."""
    return not isinstance(error, Refused) or error.status == "UNAVAILABLE"
