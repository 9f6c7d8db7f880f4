"""What keeps the rows of the version that a process reads as they are: its pin of their side."""

from collections.abc import Callable
from functools import partial

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.serving.gate import Gate
from torchrec_bls.lifetime import Living, When, at_exit, do_all, in_forked_child, new_lock

_NOTHING: tuple[int, object] = (0, None)


class SidePins:
    """The pin of a process whose forwards all read one version, as long as they do.

    To pin a side takes longer than a forward may lose. So the process keeps its pin from one
    forward to the next, until it changes to another version. Or the thread that follows lets go of
    it: it finds that no forward runs, and that none has begun since its last look or a later
    version is there.

    That thread takes the pin away first and then looks for forwards. A forward enters the gate
    first and then looks for the pin. So one of the two sees the other.

    Args:
        gate: gate of the forwards.
        pin: function that pins the side of a generation: it returns the pin, which ends when
            nothing refers to it any more, or None if the rows are written over by now.

    Attributes:
        held: serial number of the version whose side is pinned, and the pin; 0: none.
        ready: generation that is pinned for all forwards that enter; None: they have to ask.
        is_used: whether a forward has begun since the thread's last look.
    """

    def __init__(self, gate: Gate, pin: Callable[[Generation], object | None]) -> None:
        self.held = _NOTHING
        self.ready: Generation | None = None
        self.is_used = False
        self._gate = gate
        self._pin = pin
        self._lock = new_lock()
        _all.add(self)

    def hold(self, generation: Generation, *, is_newest: bool) -> bool:
        """Pins the side of a generation for a forward that has entered, and for those that follow.

        Args:
            generation: generation that the forward reads.
            is_newest: whether no later one is there. Else the pin is made anew, so that an owner
                who waits for the side gets it between two forwards.

        Returns:
            False if its rows are written over by now.
        """
        with self._lock:
            if not (is_newest and self.held[0] == generation.serial):
                pin = self._pin(generation)
                if pin is None:
                    return False
                self.held = generation.serial, pin
            self.ready = generation if is_newest else None
            self.is_used = True
            return True

    def of(self, generation: Generation) -> object | None:
        """Returns a pin of the side of a generation for a lookup, which may be past all forwards;
        None if its rows are written over by now."""
        # A pin that the thread that follows has taken away is put back if a forward needs it. Until
        # then the owner, who may wait for the side, admits no other one.
        with self._lock:
            serial, pin = self.held
            return pin if serial == generation.serial else self._pin(generation)

    def forget_before(self, serial: int) -> None:
        """Lets go of the version before one that all forwards read from now on. The next one asks
        in any case."""
        with self._lock:
            self.ready = None
            if self.held[0] < serial:
                self.held = _NOTHING

    def let_go(self, newest: int) -> None:
        """Lets go of what no forward needs. The thread that follows calls it.

        Args:
            newest: serial number of the newest version that is there.
        """
        if self.held is _NOTHING:
            return
        if self.is_used and self.held[0] == newest:
            self.is_used = False
            return
        with self._lock:
            held, ready = self.held, self.ready
            self.held, self.ready = _NOTHING, None
            is_needed = True
            try:
                is_needed = bool(self._gate.running())
            finally:
                if is_needed:
                    # Where a later one is there, each forward pins anew: see `hold`.
                    self.held, self.ready = held, ready if held[0] == newest else None

    def _begin_in_child(self) -> None:
        self.held, self.ready = _NOTHING, None  # it is the parent's


_all: Living[SidePins] = Living()


@in_forked_child
def _begin_in_child() -> None:
    do_all(each._begin_in_child for each in _all)


@at_exit(When.FOLLOWERS)
def _let_all_go() -> None:
    # No thread does so any more, and the process may wait long for its children.
    do_all([partial(each.let_go, 0) for each in _all])
