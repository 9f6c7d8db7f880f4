"""Who may call an exchanging module, after a call that a signal has ended."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from tests.direct.at_every_line import places_of, strike
from torchrec_bls.collective.forwards import Forwards
from torchrec_bls.distributed.inputs.callers import Callers

DEADLINE = 30.0


class Called(nn.Module):
    """A module in whose call a thread stays until it is told to go on."""

    def __init__(self, callers: Callers) -> None:
        super().__init__()
        self.callers = callers
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self) -> None:
        self.callers.enter()
        self.inside.set()
        assert self.go_on.wait(DEADLINE)


@contextmanager
def called_by_another(module: Called) -> Iterator[None]:
    thread = threading.Thread(target=module)
    thread.start()
    assert module.inside.wait(DEADLINE)
    try:
        yield
    finally:
        module.go_on.set()
        thread.join(DEADLINE)


def test_a_refused_call_that_a_signal_ends_lets_no_later_one_through() -> None:
    callers = Callers("the module", Forwards(), lambda: True)
    module = Called(callers)

    def call() -> None:
        with pytest.raises(ValueError, match="another thread of this process"):
            callers.enter()

    with called_by_another(module):
        places = places_of(call)
        assert len(places) > 10
        for place in places:
            strike(call, place, KeyboardInterrupt)
            call()
    callers.enter()


def test_a_signal_leaves_the_leftovers_of_a_pipeline_to_the_next_call() -> None:
    finished: list[str] = []
    callers = Callers("the module", Forwards(), lambda: False)

    def leave() -> None:
        finished.clear()
        callers.release(lambda: finished.append("all"))

    def call() -> None:
        callers.enter()

    leave()
    for place in places_of(call):
        leave()
        strike(call, place, KeyboardInterrupt)
        call()
        assert "all" in finished
