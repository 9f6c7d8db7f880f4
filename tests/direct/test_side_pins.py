"""The pin of a process stays from one forward to the next, and no longer than it is needed."""

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.direct.threads import until
from torchrec_bls import lifetime
from torchrec_bls.direct.serving import side_pins
from torchrec_bls.direct.serving.gate import Gate
from torchrec_bls.direct.serving.side_pins import SidePins
from torchrec_bls.lifetime import When

DEADLINE = 30.0


class Version:
    """A generation on a side.

    Attributes:
        serial: its serial number.
        is_gone: whether its rows are written over.
        pins: how often it was pinned.
    """

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.is_gone = False
        self.pins: list[weakref.ref[Any]] = []

    @property
    def is_pinned(self) -> bool:
        return any(each() is not None for each in self.pins)


class Pin:
    """What a pin is to whoever keeps it."""


def pin(version: Any) -> Pin | None:
    if version.is_gone:
        return None
    made = Pin()
    version.pins.append(weakref.ref(made))
    return made


def new() -> tuple[Gate, SidePins]:
    gate = Gate()
    return gate, SidePins(gate, pin)


def forward(
    gate: Gate,
    pins: SidePins,
    version: Any,
    work: Callable[[], Any] = lambda: None,
    leave: bool = True,
) -> None:
    gate.enter(sys._getframe())
    assert pins.hold(version, is_newest=True)
    work()
    if leave:
        gate.leave()


def test_forwards_share_a_pin() -> None:
    gate, pins = new()
    version: Any = Version(3)
    for _ in range(5):
        forward(gate, pins, version)
    assert len(version.pins) == 1 and version.is_pinned
    assert pins.of(version) is version.pins[0]()
    pins.let_go(3)  # one has begun since the last look
    forward(gate, pins, version)
    pins.let_go(3)
    assert version.is_pinned and len(version.pins) == 1
    pins.let_go(3)
    assert not version.is_pinned and pins.held[0] == 0
    forward(gate, pins, version)
    assert len(version.pins) == 2


def test_a_forward_keeps_its_pin_however_long_it_takes() -> None:
    gate, pins = new()
    version: Any = Version(3)

    def stay() -> None:
        for newest in (3, 3, 4, 4):
            pins.let_go(newest)
            assert version.is_pinned and pins.held[0] == 3
            # Once a later one is there, the next forward pins anew.
            assert (pins.ready is version) == (newest == 3)

    forward(gate, pins, version, stay)
    pins.let_go(4)  # although one has begun since the last look
    assert not version.is_pinned


def test_a_forward_that_did_not_leave_needs_none() -> None:
    gate, pins = new()
    version: Any = Version(3)
    forward(gate, pins, version, leave=False)
    pins.let_go(3)
    pins.let_go(3)
    assert not version.is_pinned and gate.running() == {}


def test_a_later_version_takes_the_place_of_the_one_before() -> None:
    gate, pins = new()
    first: Any = Version(3)
    second: Any = Version(4)
    forward(gate, pins, first)
    pins.forget_before(3)
    assert first.is_pinned and pins.ready is None
    forward(gate, pins, second)
    assert second.is_pinned and not first.is_pinned
    pins.forget_before(9)  # a whole one serves, which needs no pin
    assert not second.is_pinned


def test_a_process_that_stays_behind_keeps_nobody_waiting() -> None:
    """Its model refuses the later version, for example. It pins anew at each forward."""
    _, pins = new()
    version: Any = Version(3)
    assert pins.hold(version, is_newest=True) and pins.ready is version
    assert pins.hold(version, is_newest=False) and len(version.pins) == 2
    assert pins.ready is None  # the next one asks
    version.is_gone = True
    assert not pins.hold(version, is_newest=False)
    pins.let_go(4)
    assert not version.is_pinned


def test_a_lookup_past_all_forwards_has_a_pin_of_its_own() -> None:
    gate, pins = new()
    version: Any = Version(3)
    own = pins.of(version)
    assert version.is_pinned and pins.held[0] == 0
    forward(gate, pins, version)
    shared = pins.of(version)
    assert shared is not own
    pins.let_go(4)
    assert pins.held[0] == 0 and version.pins[1]() is not None  # the lookup has it
    del own, shared
    assert not version.is_pinned
    version.is_gone = True
    assert pins.of(version) is None and not pins.hold(version, is_newest=True)


def test_a_lookup_waits_for_the_pin_of_its_forward_to_be_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner waits for the side meanwhile, and admits no other pin."""
    gate, pins = new()
    version: Any = Version(3)
    found: list[object] = []
    lookup = threading.Thread(target=lambda: found.append(pins.of(version)))
    running = gate.running

    def look_up_first() -> Any:
        assert pins.held[0] == 0
        lookup.start()
        lookup.join(0.2)  # it would be over by then, with no pin
        return running()

    def stay() -> None:
        version.is_gone = True
        monkeypatch.setattr(gate, "running", look_up_first)
        pins.let_go(4)
        lookup.join(DEADLINE)

    forward(gate, pins, version, stay)
    assert found == [version.pins[0]()] != [None]


def test_a_forward_and_the_thread_that_lets_go_see_each_other() -> None:
    """Whenever a forward runs its version is pinned, whatever the thread does meanwhile."""
    gate, pins = new()
    version: Any = Version(3)
    ends = threading.Event()

    def let_go() -> None:
        while not ends.is_set():
            pins.let_go(4)

    thread = threading.Thread(target=let_go)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20_000):
            gate.enter(sys._getframe())
            # As ServedModel does.
            if pins.ready is not version:
                assert pins.hold(version, is_newest=True)
            assert version.pins[-1]() is not None
            gate.leave()
            if len(version.pins) > 1000:
                del version.pins[:-1]
    finally:
        ends.set()
        thread.join(DEADLINE)
        sys.setswitchinterval(before)
    until(lambda: (pins.let_go(4), gc.collect(), not version.is_pinned)[-1])


def test_a_process_that_ends_lets_go_of_its_pin() -> None:
    """It may wait long for its children then, with no thread that follows."""
    gate, pins = new()
    version: Any = Version(3)
    forward(gate, pins, version)
    assert (When.FOLLOWERS, side_pins._let_all_go) in lifetime._ends
    side_pins._let_all_go()
    assert not version.is_pinned and pins.held[0] == 0


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_has_no_pin() -> None:
    gate, pins = new()
    version: Any = Version(3)
    forward(gate, pins, version)
    child = os.fork()
    if child == 0:
        os._exit(0 if pins.held[0] == 0 and pins.hold(version, is_newest=True) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pins.held[0] == 3 and version.is_pinned
