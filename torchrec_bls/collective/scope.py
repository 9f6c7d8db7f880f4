"""The forward as a scope: it ends on all ranks, also if a rank's own part in it ends early.

docs/design/forwards.md has the rule and its reasons.
"""

import sys
import time
from collections.abc import Iterable
from threading import get_ident
from types import TracebackType

from torchrec_bls.collective.forwards import Exchanging, is_in_training, is_of_forward
from torchrec_bls.errors import BatchRefusedError, BLSError, PeerTimeoutError, named
from torchrec_bls.lifetime import new_lock

# Seconds between two looks for what peers do.
_PAUSE = 0.0002
_ENDED_AFTER_IDS = (
    "a forward ended early, and ids of later batches were posted already, as TorchRec's pipelines "
    "do: {}. Shard the model anew on all ranks"
)

# Held while a scope begins, or gets another thread. Nobody waits for a peer meanwhile.
_changing = new_lock()


class Scope:
    """A forward on this rank. Its modules may be of several models. A context manager.

    If it ends early, this rank takes part in the calls that its peers still make in it.

    Args:
        modules: modules that may be called. Those in an open scope of this thread stay in that one.
        owner: object that opens one scope at a time. A scope that it finds open was left open.

    Attributes:
        modules: modules of the forward, which has begun.
        thread: identity of the thread that is in it.
        is_left: whether an interrupt has ended it for that thread.
        all_raise: whether all ranks raise in it, since one refuses its batch.
    """

    def __init__(self, modules: Iterable[Exchanging], owner: object = None) -> None:
        self.modules: list[Exchanging] = []
        self.thread = get_ident()
        self._candidates = modules
        self._owner = self if owner is None else owner
        self.is_left = False
        self.all_raise = False

    def __enter__(self) -> "Scope":
        """Begins the forward.

        Raises:
            ValueError: another thread is in a forward with one of the modules.
        """
        self.thread = get_ident()
        while True:
            free = []
            for module in self._candidates:
                if (before := module.forwards.now[1]) is not None:
                    before.make_way(self._owner)
                if module.joins_scopes():
                    if (around := module.forwards.now[1]) is None:
                        free.append(module)
                    else:
                        around.admit()
            try:
                with _changing:
                    for module in free:
                        if module.forwards.now[1] is not None:
                            break  # another thread was faster
                    else:
                        self.modules = free
                        for module in free:
                            module.forwards.begin(self)
                        return self
            except BaseException:  # of a signal: nothing has begun
                for module in free:
                    module.forwards.undo(self)
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None or _fails_all(error):
                self._end()
            elif isinstance(error, Exception):
                self._end_early(named(error), refuses_all=False)
            else:
                self.is_left = True  # an interrupt waits for nobody
        except BaseException:
            self.is_left = True
            raise

    @property
    def is_own(self) -> bool:
        """Returns whether this thread is in it."""
        return self.thread == get_ident()

    def admit(self) -> None:
        """Lets this thread call a module. Ends the scope before if it was left open.

        Raises:
            ValueError: another thread is in it.
        """
        self.make_way()
        if not self.is_own:
            raise ValueError(
                f"another thread of this process (identity {self.thread}) is calling the model. "
                "All ranks match calls by their order, so one thread at a time may call it: use a "
                "lock"
            )

    def make_way(self, owner: object = None) -> None:
        """Ends the scope if it was left open, as one that its owner finds open was."""
        if not self._is_over(owner):
            return
        try:
            with _changing:
                if not self._is_over(owner):
                    return
                self.thread, self.is_left = get_ident(), False
            # The caller had control since, and may have changed weights: no rank gets rows.
            self._end_early("its forward was interrupted", refuses_all=True)
        except BaseException:
            self.is_left |= self.is_own
            raise

    def _is_over(self, owner: object) -> bool:
        """Returns whether nobody is in it: `owner` opens another one, or its thread was interrupted
        or has ended."""
        if self.is_own:
            return self.is_left or self._owner is owner
        return self.is_left or self.thread not in sys._current_frames()

    def _end(self) -> None:
        for module in self.modules:
            number, scope = module.forwards.now
            if scope is self:
                if (channel := module.calls_channel) is not None:
                    channel.native.tell_end(number + 1)
                module.forwards.end(self)

    @property
    def _open(self) -> list[Exchanging]:
        """Returns the modules whose forward has not ended."""
        return [module for module in self.modules if module.forwards.now[1] is self]

    def _tell(self, module: Exchanging) -> None:
        channel = module.calls_channel
        if channel is not None:
            channel.native.tell_end(module.forwards.now[0] + 1)

    def _end_early(self, reason: str, refuses_all: bool) -> None:
        try:
            if not self.all_raise and any(_must_refuse(m, refuses_all) for m in self._open):
                # The ids have left without the refusal.
                self._fail(_ENDED_AFTER_IDS.format(reason))
            else:
                self._take_part_in_the_rest(reason, refuses_all)
        except Exception:
            self._end()
            raise
        self._end()

    def _take_part_in_the_rest(self, reason: str, refuses_all: bool) -> None:
        """Takes part in the calls of the peers until all have ended the forward."""
        waiting_since = None
        if not self.all_raise:
            for module in self._open:
                module.forwards.fail_alone()
        while any(module.calls_channel is not None for module in self._open):
            if waiting_since is None:
                waiting_since = time.monotonic()
                # Before it looks: two ranks that end early would wait for each other. And again
                # after each call, which may have made a channel.
                for module in self._open:
                    self._tell(module)
            if self._go_on(reason, refuses_all):
                waiting_since = None
                continue
            asked = next((module for module in self._open if module.is_asked_ahead()), None)
            if asked is not None:
                if _must_refuse(asked, refuses_all):
                    self._fail(_ENDED_AFTER_IDS.format(reason))
                    return
                asked.answer_ahead()
                waiting_since = None
                continue
            late = next(filter(_late_peers, self._open), None)
            if late is None:
                return
            if time.monotonic() - waiting_since > late.deadline:
                self._give_up(late)
            time.sleep(_PAUSE)

    def _go_on(self, reason: str, refuses_all: bool) -> bool:
        """Takes the next step with the peers, if one of them has begun it."""
        for module in self._open:
            forwards, channel = module.forwards, module.calls_channel
            number = forwards.now[0]
            label = None if channel is None else channel.native.called(number + 1)
            if label is None:
                if self._is_awaited(module):
                    module.meet()
                    return True
            elif is_of_forward(label, number):
                forwards.follow(label)
                # In training no rank may step without this one.
                trains = is_in_training(label)
                module.take_part(trains, reason if trains or refuses_all else None)
                return True
        return False

    def _is_awaited(self, module: Exchanging) -> bool:
        """Returns whether a peer waits at a meeting of `module` in this forward."""
        waiting = module.awaiting()
        if not waiting:
            return False
        # Asked afterwards: who comes there in a later forward has told before that this one ended.
        met = [each for each in self._open if each.calls_channel is not None]
        return any(all(rank in _late_peers(each) for each in met) for rank in waiting)

    def _give_up(self, module: Exchanging) -> None:
        channel = module.calls_channel
        assert channel is not None
        reason = (
            f"channel '{channel.name}' on {channel.names.of(channel.rank)}: "
            f"{channel.names.of_all(_late_peers(module))} did not end a forward within "
            f"{module.deadline} s that has ended here. A rank that is stuck or stopped causes this"
        )
        self._fail(reason)
        raise PeerTimeoutError(reason)

    def _fail(self, reason: str) -> None:
        for module in self._open:
            module.fail(reason)


def _fails_all(error: BaseException) -> bool:
    """Returns whether no rank goes on after `error`."""
    return isinstance(error, BLSError) and not isinstance(error, BatchRefusedError)


def _must_refuse(module: Exchanging, refuses_all: bool) -> bool:
    """Returns whether this rank owes rows of calls that no rank may go on with."""
    # Not over values: a context that is collected meanwhile takes its call out.
    ahead = list(module.forwards.ahead.values())
    return bool(ahead) and (refuses_all or any(call.trains for call in ahead))


def _late_peers(module: Exchanging) -> list[int]:
    """Returns the peers that have not ended the forward, as far as known."""
    channel = module.calls_channel
    return [] if channel is None else channel.native.not_ended(module.forwards.now[0] + 1)
