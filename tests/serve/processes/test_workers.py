"""A place for a worker, with processes that do as the test says."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchrec_bls.serve.channel import Beat, Begun, Channel, pair
from torchrec_bls.serve.processes.front_process import Turn
from torchrec_bls.serve.processes.workers import Patience, Place
from torchrec_bls.serve.status import Refreshes, Status

PATIENCE = 30.0
Life = Callable[[Channel], None]


class Forks:
    """Forks children of the test in place of workers, each with a life of its own.

    Args:
        lives: what each of them does, the last one for all others.

    Attributes:
        age: as of zygotes.
        made: numbers of the children.
        names: their names.
        is_ready: whether there is a zygote.
    """

    def __init__(self, *lives: Life) -> None:
        self.age = 0
        self.made: list[int] = []
        self.names: list[str] = []
        self.is_ready = True
        self._lives = list(lives)

    def fork(self, name: str) -> Channel | None:
        if not self.is_ready:
            return None
        here, there = pair()
        life = self._lives.pop(0) if len(self._lives) > 1 else self._lives[0]
        child = os.fork()
        if not child:
            try:
                here.close()
                channel = Channel(there)
                channel.send(Begun(os.getpid()))
                life(channel)
            finally:
                os._exit(7)
        there.close()
        self.made.append(child)
        self.names.append(name)
        return here


def beats(channel: Channel) -> None:
    """A good worker: it ends when it is told to."""
    while channel.send(Beat()):
        time.sleep(0.01)


def beats_once(channel: Channel) -> None:
    channel.send(Beat())
    time.sleep(PATIENCE)


def ends(channel: Channel) -> None:
    pass


def ignores_the_end(channel: Channel) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    beats(channel)


class Front:
    """A front that has requests of a worker until the test says otherwise.

    Attributes:
        done_with: names of those that it has none of.
    """

    def __init__(self) -> None:
        self.done_with: set[str] = set()

    def is_done_with(self, worker: str) -> bool:
        return worker in self.done_with


@pytest.fixture
def place_of() -> Iterator[Callable[..., Any]]:
    made: list[Place] = []

    def place(
        forks: Forks,
        *,
        ready: float = PATIENCE,
        alive: float = PATIENCE,
        front: Front | None = None,
    ) -> Place:
        patience = Patience(ready, alive)
        made.append(Place(1, forks, Counter(), patience, front))  # type: ignore[arg-type]
        return made[-1]

    yield place
    for each in made:
        each.end(time.monotonic())
        for pid in each.pids:
            os.kill(pid, signal.SIGKILL)
        until(each, lambda: not each.workers, look=each.has_ended)  # noqa: B023


def until(
    place: Place, condition: Callable[[], bool], look: Callable[[float], Any] | None = None
) -> None:
    """Looks after a place until a condition is met."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        (look or (lambda now: place.look(now, may_renew=True)))(time.monotonic())
        time.sleep(0.005)


def answers(place: Place) -> bool:
    return place.answers


def test_a_worker_answers_from_its_first_beat_on(place_of: Callable[..., Place]) -> None:
    forks = Forks(beats)
    place = place_of(forks)
    until(place, lambda: answers(place))
    assert place._starts == {"start": 1}
    assert place.pids == forks.made


def test_a_worker_that_dies_is_followed_by_another_one(
    place_of: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    forks = Forks(beats)
    place = place_of(forks)
    until(place, lambda: answers(place))
    os.kill(forks.made[0], signal.SIGKILL)
    until(place, lambda: len(forks.made) == 2 and answers(place))
    assert place._starts == {"start": 1, "death": 1}
    assert "worker 1a has ended with status -9: another one begins" in caplog.text
    with pytest.raises(ChildProcessError):  # it was waited for
        os.waitpid(forks.made[0], os.WNOHANG)


def test_a_worker_that_stands_still_is_killed(
    place_of: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    forks = Forks(beats_once, beats)
    place = place_of(forks, ready=0.1, alive=0.2)
    until(place, lambda: len(forks.made) == 2)
    assert place._starts == {"start": 1, "stall": 1}
    assert re.search(r"worker 1a has done nothing for \d\.\d s: it is killed", caplog.text)


def test_a_worker_that_stands_still_for_a_while_is_not_ready_meanwhile(
    place_of: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    forks = Forks(beats)
    place = place_of(forks, ready=0.5)
    until(place, lambda: answers(place))
    assert place.turns == {"1a": Turn.READY}
    os.kill(forks.made[0], signal.SIGSTOP)
    until(place, lambda: not answers(place))
    assert place.turns == {"1a": Turn.STALLED}
    assert "worker 1a is not ready: it does nothing for" in caplog.text
    os.kill(forks.made[0], signal.SIGCONT)
    until(place, lambda: answers(place))
    assert place.turns == {"1a": Turn.READY}
    assert place.pids == forks.made


def test_who_was_not_looked_at_is_not_blamed(place_of: Callable[..., Place]) -> None:
    forks = Forks(beats_once)
    place = place_of(forks)
    until(place, lambda: answers(place))
    now = time.monotonic() + 100
    place.excuse(now)
    place.look(now, may_renew=True)
    assert answers(place) and place.pids == forks.made


def test_workers_that_end_at_once_come_later_and_later(place_of: Callable[..., Place]) -> None:
    forks = Forks(ends)
    place = place_of(forks)
    until(place, lambda: len(forks.made) == 4)
    assert place.ending == "worker 1a has ended with status 7"
    assert place._pause.until - time.monotonic() <= 0.8


def test_an_outdated_worker_goes_when_its_successor_answers(place_of: Callable[..., Place]) -> None:

    def begins_slowly(channel: Channel) -> None:
        time.sleep(0.3)
        beats(channel)

    forks = Forks(beats, begins_slowly)
    place = place_of(forks)
    until(place, lambda: answers(place))
    first = place.worker
    forks.age += 1
    assert place.is_changing()
    place.look(time.monotonic(), may_renew=False)
    assert len(forks.made) == 1  # another place has its turn
    until(place, lambda: len(forks.made) == 2)
    assert place.worker is first
    until(place, lambda: place.worker is not first)
    until(place, lambda: len(place.workers) == 1)
    assert place.pids == forks.made[1:]
    assert place._starts == {"start": 1, "renewal": 1}
    assert not place.is_changing()


def test_a_worker_is_told_to_go_when_the_front_is_done_with_it(
    place_of: Callable[..., Place],
) -> None:
    forks, front = Forks(beats), Front()
    place = place_of(forks, front=front)
    until(place, lambda: answers(place))
    forks.age += 1
    until(place, lambda: place.worker is not None and place.worker.name == "1b")
    for _ in range(3):
        place.look(time.monotonic(), may_renew=True)
    assert place.turns == {"1a": Turn.LEAVING, "1b": Turn.READY}
    assert not any(each.is_ending for each in place.workers)
    front.done_with.add("1a")
    until(place, lambda: place.pids == forks.made[1:])
    assert place.turns == {"1b": Turn.READY}


def test_a_worker_that_the_front_is_never_done_with_is_told_to_go(
    place_of: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_bls.serve.processes.workers._LEAVING", 0.2)
    forks = Forks(beats)
    place = place_of(forks, front=Front())
    until(place, lambda: answers(place))
    forks.age += 1
    until(place, lambda: len(forks.made) == 2 and place.pids == forks.made[1:])


def test_a_worker_that_does_not_end_is_killed(
    place_of: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_bls.serve.processes.workers._ENDING", 0.2)
    place = place_of(Forks(ignores_the_end))
    until(place, lambda: answers(place))
    place.end(time.monotonic())
    until(place, lambda: not place.workers, look=place.has_ended)


def test_a_worker_that_has_not_begun_ends_at_once(place_of: Callable[..., Place]) -> None:
    """It would not be told: what was forked from a zygote does not listen to SIGTERM at first."""

    def waits(channel: Channel) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(PATIENCE)

    forks = Forks(waits)
    place = place_of(forks)
    place.look(time.monotonic(), may_renew=True)
    began = time.monotonic()
    place.end(began)  # its number is not known
    until(place, lambda: not place.workers, look=lambda _: place.has_ended(began))


def test_without_a_zygote_a_place_waits(place_of: Callable[..., Place]) -> None:
    forks = Forks(beats)
    forks.is_ready = False
    place = place_of(forks)
    place.look(time.monotonic(), may_renew=True)
    assert not place.workers and not place._starts
    forks.is_ready = True
    until(place, lambda: answers(place))


def test_a_worker_is_told_what_is_new(place_of: Callable[..., Place]) -> None:
    told, say = pair()
    say.set_inheritable(True)

    def listens(channel: Channel) -> None:
        channel.send(Beat())
        while True:
            message, _ = channel.receive()
            Channel(say).send(message)

    place = place_of(Forks(listens))
    until(place, lambda: answers(place))
    say.close()
    one, other = Status(Refreshes(), 1, 1, {}), Status(Refreshes(1, "no memory"), 1, 1, {})
    for status in (one, one, other, other, one):
        place.tell(status)
    assert [told.receive()[0] for _ in range(3)] == [one, other, one]
    told.close()
