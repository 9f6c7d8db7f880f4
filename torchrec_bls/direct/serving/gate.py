"""Which threads are in a forward of a model, so that its weights change between forwards alone."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType

from torch import nn

from torchrec_bls.errors import PeerTimeoutError
from torchrec_bls.lifetime import Living, do_all, in_forked_child

# Seconds between two looks at those inside: an interrupted thread does not say that it left.
_PAUSE = 0.05


class Gate:
    """Forwards enter and leave; a change of the weights closes the gate until it is over.

    A forward costs one store each way. Nothing of it can be left behind: a forward counts as long
    as its frame runs, whether its thread has left, was interrupted in it, or has ended.

    Attributes:
        lock: held by whoever changes the weights, or needs them unchanged. Forwards do not take it,
            unless the gate is closed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Frames of forwards by thread; more than one where a forward calls its own model.
        self._inside: dict[int, list[FrameType]] = {}
        # Released by every thread that leaves while the gate is closed; None while it is open.
        self._closing: threading.Lock | None = None
        _gates.add(self)

    def enter(self, frame: FrameType) -> bool:
        """Begins a forward. Waits while a change is under way.

        Args:
            frame: a frame that runs as long as the forward.

        Returns:
            Whether this thread is in another forward already, which sees no change before it ends.
        """
        thread, inside = get_ident(), self._inside
        if thread in inside:
            outer = list(filter(_runs, inside[thread]))
            if outer:
                inside[thread] = [*outer, frame]
                return True
        while True:
            inside[thread] = [frame]
            # Whoever closes it looks at `_inside` afterwards: one of the two sees the other.
            closing = self._closing
            if closing is None:
                return False
            self.leave()
            with self.lock:
                if self._closing is closing:  # whoever closed it was interrupted
                    self._closing = None

    def leave(self) -> None:
        """Ends the forward that this thread entered last; nothing happens if there is none."""
        thread = get_ident()
        frames = self._inside.get(thread)
        if frames is not None and len(frames) > 1:
            self._inside[thread] = frames[:-1]  # one store: the outer forward always counts
        else:
            self._inside.pop(thread, None)
        closing = self._closing
        if closing is not None:
            _wake(closing)

    def admit_running(self, model: nn.Module) -> None:
        """Lets the forwards of `model` count that began before its hooks were there."""
        frames = sys._current_frames()
        # A frame that knows itself would keep all that its callers have until garbage is collected.
        frames[get_ident()] = sys._getframe(1)
        for thread, top in frames.items():
            outermost: FrameType | None = None
            frame: FrameType | None = top
            while frame is not None:
                is_call = frame.f_code is nn.Module._call_impl.__code__
                if is_call and frame.f_locals.get("self") is model:
                    outermost = frame
                frame = frame.f_back
            if outermost is not None and not self._inside.setdefault(thread, [outermost]):
                self._inside[thread] = [outermost]

    def while_closed(self, change: Callable[[], None], deadline: float) -> None:
        """Calls `change` while no other forward runs. The caller holds `lock`.

        Args:
            change: function to call.
            deadline: seconds to wait for the forwards inside.

        Raises:
            PeerTimeoutError: a forward has not ended by then; the text names its thread. Nothing
                has changed, and the gate is open.
        """
        self._closing = left = threading.Lock()
        try:
            self._wait_until_empty(left, time.monotonic() + deadline)
            change()
        finally:
            self._closing = None

    def running(self) -> dict[int, list[FrameType]]:
        """Returns the frames of the forwards that run now, by thread."""
        found = {}
        for thread, frames in list(self._inside.items()):
            if runs_any(frames):
                found[thread] = frames
            else:
                # Not the entry: its thread may have entered anew by now, with another list.
                frames.clear()
        return found

    def _wait_until_empty(self, left: threading.Lock, end: float) -> None:
        while threads := self.running():
            rest = end - time.monotonic()
            if rest <= 0:
                raise PeerTimeoutError(
                    f"{_names_of(threads)} of this process stays in a forward of the model, which "
                    "goes on with its weights: new ones are taken between forwards"
                )
            left.acquire(timeout=min(rest, _PAUSE))

    def _forget_other_threads(self) -> None:
        """In a forked child no other thread goes on, and none will release a lock."""
        self.lock = threading.Lock()
        own = self._inside.get(get_ident())
        self._inside = {} if own is None else {get_ident(): own}
        self._closing = None


def runs_any(frames: Iterable[FrameType]) -> bool:
    """Returns whether the function of one of the frames has not returned or raised yet."""
    return any(map(_runs, frames))


def _runs(frame: FrameType) -> bool:
    try:
        frame.clear()  # refused by a frame that runs; any other keeps nothing alive afterwards
    except RuntimeError:
        return True
    return False


def _wake(waiting: threading.Lock) -> None:
    try:
        waiting.release()
    except RuntimeError:  # another thread has woken it already
        return


def _names_of(threads: Iterable[int]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return " and ".join(f"thread '{names.get(each, 'unknown')}' ({each})" for each in threads)


_gates: Living[Gate] = Living()


@in_forked_child
def _forget_all() -> None:
    do_all(gate._forget_other_threads for gate in _gates)
