"""The forward as a scope: the call that a message belongs to, and the calls that a rank still owes.

docs/design/forwards.md has the rule and its reasons.
"""

import sys
import time
from collections.abc import Callable, Sequence
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.errors import BatchRefusedError, BLSError, PeerTimeoutError, named

# A label has the low bits of a forward's number, and below them those of a place in it. Ranks are
# never so far apart that equal bits could stand for others.
_PLACE_BITS = 8
_PLACES = (1 << _PLACE_BITS) - 1
_FORWARDS = (1 << 32 - _PLACE_BITS) - 1
# Seconds between two looks for what peers do.
_PAUSE = 0.0002
_ENDED_AFTER_IDS = (
    "a forward ended early, and ids of later batches were posted already, as TorchRec's pipelines "
    "do: {}. Shard the model anew on all ranks"
)


class Forwards:
    """The forwards of one module on this rank, and its calls in the present one.

    Attributes:
        ahead: calls outside of scopes that this rank may still owe its rows, by label. The module
            keeps there what it answers them with, and takes a call out once rows are sent.
        broke_off: whether nobody can make a call any more that peers count on. A forward had
            failed, and its pipeline was dropped or reset.
    """

    def __init__(self) -> None:
        self.ahead: dict[int, Any] = {}
        self.broke_off = False
        self._counted_on: int | None = None
        self._place = 0
        # Changed by one store: a signal may raise between any two.
        self._state: tuple[int, Scope | None] = (0, None)

    @property
    def scope(self) -> "Scope | None":
        """Returns the scope that is open; None between scopes."""
        return self._state[1]

    @property
    def number(self) -> int:
        """Returns the number of the forward that is open, or comes next."""
        return self._state[0]

    def call(self) -> int:
        """Returns the label of a call that begins. Outside of scopes it is a forward of its own.

        Raises:
            ValueError: the open scope is another thread's.
        """
        if (open_scope := self._state[1]) is not None:
            open_scope.admit_call()
        number, scope = self._state
        if scope is None:
            self._state = (number + 1, None)
            label = label_of(number, 0)
            self.ahead[label] = None
            return label
        place, self._place = self._place, self._place + 1
        return label_of(number, place)

    def refuse(self) -> None:
        """Notes that all ranks raise for a call of the present forward, where they wait for ids."""
        if (scope := self._state[1]) is not None:
            scope.all_raise = True

    def drop(self, label: int) -> None:
        """Notes that nobody can make a call of `ahead` any more."""
        if self.ahead.pop(label, None) is not None and label == self._counted_on:
            self.broke_off = True

    def fail_alone(self) -> None:
        """Notes that the present forward fails on this rank. Peers will make the call that was
        posted just before it. Older ones are made in it, or never."""
        newest = label_of(self.number - 1, 0)
        self._counted_on = newest if newest in self.ahead else None

    def meet(self) -> None:
        """Counts from here on: the module's ranks have met, each in its present forward."""
        self.ahead.clear()
        self.broke_off = False
        self._place = 0
        self._state = (0, self.scope)

    def begin(self, scope: "Scope") -> None:
        """Begins a forward."""
        self._place = 0
        self._state = (self._state[0], scope)

    def end(self) -> None:
        """Ends a forward."""
        self._state = (self._state[0] + 1, None)


class Exchanging(Protocol):
    """A module whose calls exchange messages. They carry the labels of `forwards`."""

    forwards: Forwards

    @property
    def calls_channel(self) -> BoundedLagChannel | None:
        """Returns the channel on which each call posts first; None until its ranks have met."""

    @property
    def deadline(self) -> float:
        """Returns the seconds that waits for other ranks may take."""

    def is_awaited(self) -> bool:
        """Returns whether a rank waits for this one where the module's ranks meet, before they post
        by a plan for the first time."""

    def take_part(self, refusal: str | None) -> None:
        """Takes part in the next call, without samples.

        Args:
            refusal: reason why no rank may get rows; None: all get them.
        """

    def is_asked_ahead(self) -> bool:
        """Returns whether a peer has sent rows of a call that this rank owes its own, since ids
        were posted ahead."""

    def answer_ahead(self) -> None:
        """Sends the rows of the call that `is_asked_ahead` has found."""

    def fail(self, reason: str) -> None:
        """Fails the module on all ranks."""


class Scope:
    """A forward on this rank. Its modules may be of several models. A context manager.

    If it ends early, this rank takes part in the calls that its peers still make in it.

    Args:
        modules: modules of the forward. Those in an open scope of this thread stay in that one.
        owner: object that opens one scope at a time. A scope that it finds open was left open.

    Attributes:
        all_raise: whether all ranks raise in it, since one refuses its batch.

    Raises:
        ValueError: another thread has a scope with one of the modules.
    """

    def __init__(self, modules: Sequence[Exchanging], owner: object = None) -> None:
        self.all_raise = False
        self._modules = modules
        self._owner = self if owner is None else owner
        self._thread = get_ident()
        self._is_left = False  # by its caller, who was interrupted
        self._is_ending = False

    def __enter__(self) -> "Scope":
        free = []
        for module in self._modules:
            if (open_scope := module.forwards.scope) is not None:
                open_scope._make_way_for(self)
                if module.forwards.scope is not None:
                    continue
            free.append(module)
        self._modules = free
        for module in free:
            module.forwards.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or _fails_all(error):
            self._end()
        elif isinstance(error, Exception):
            self._end_early(named(error) if torch.is_grad_enabled() else None)
        else:
            self._is_left = True  # an interrupt waits for nobody

    @property
    def is_own(self) -> bool:
        """Returns whether this thread opened it."""
        return self._thread == get_ident()

    def admit_call(self) -> None:
        """Lets this thread call a module. Ends the scope before if it was left open.

        Raises:
            ValueError: the scope is another thread's.
        """
        if self._thread == get_ident() and not self._is_left:
            return
        if self._is_abandoned:
            self._end_left()
        else:
            self._refuse_threads()

    @property
    def _is_abandoned(self) -> bool:
        """Returns whether nobody is in it: its caller was interrupted, or its thread has ended."""
        return self._is_left or (not self.is_own and self._thread not in sys._current_frames())

    def _end_left(self) -> None:
        # The caller had control since, and may have changed weights.
        self._end_early("its forward was interrupted")

    def _make_way_for(self, other: "Scope") -> None:
        if self._is_abandoned:
            self._end_left()
            return
        self._refuse_threads()
        if self._is_ending or self._owner is other._owner:
            self._end_left()

    def _refuse_threads(self) -> None:
        if not self.is_own:
            raise ValueError(
                f"another thread of this process (identity {self._thread}) is calling the model. "
                "All ranks match calls by their order, so one thread at a time may call it: use a "
                "lock"
            )

    def _end(self) -> None:
        self._tell()
        for module in self._modules:
            module.forwards.end()

    def _tell(self) -> None:
        for module in self._modules:
            channel = module.calls_channel
            if channel is not None:
                channel.native.tell_end(module.forwards.number + 1)

    def _end_early(self, refusal: str | None) -> None:
        self._is_ending = True  # until the end, which an interrupt may prevent
        self._is_left = False
        if refusal is not None and not self.all_raise and self._owes_rows():
            # Their ids have left without the refusal.
            self._fail(_ENDED_AFTER_IDS.format(refusal))
            self._end()
            return
        if not self.all_raise:
            for module in self._modules:
                module.forwards.fail_alone()
        # Before it takes part: two ranks that end early would wait for each other.
        self._tell()
        try:
            self._take_part_in_the_rest(refusal)
        except Exception:
            self._end()
            raise
        self._end()

    def _take_part_in_the_rest(self, refusal: str | None) -> None:
        """Takes part in the calls of the peers until all have ended the forward."""
        waiting_since = time.monotonic()
        while any(each.calls_channel is not None for each in self._modules):
            called = next(filter(_is_called, self._modules), None)
            if called is not None:
                called.take_part(refusal)
                waiting_since = time.monotonic()
                continue
            asked = next((each for each in self._modules if each.is_asked_ahead()), None)
            if asked is not None:
                if refusal is not None:
                    self._fail(_ENDED_AFTER_IDS.format(refusal))
                    return
                asked.answer_ahead()
                waiting_since = time.monotonic()
                continue
            late = next(filter(_late_peers, self._modules), None)
            if late is None:
                return
            if time.monotonic() - waiting_since > late.deadline:
                self._give_up(late)
            time.sleep(_PAUSE)

    def _owes_rows(self) -> bool:
        return any(each.forwards.ahead for each in self._modules)

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
        for each in self._modules:
            each.fail(reason)


def _fails_all(error: BaseException) -> bool:
    """Returns whether no rank goes on after `error`."""
    return isinstance(error, BLSError) and not isinstance(error, BatchRefusedError)


def _is_called(module: Exchanging) -> bool:
    """Returns whether a peer has begun a call of the forward that this rank has not."""
    channel, forwards = module.calls_channel, module.forwards
    if channel is not None:
        label = channel.native.called(forwards.number + 1)
        if label is not None:
            return label >> _PLACE_BITS == forwards.number & _FORWARDS
    # With another plan the ranks meet again before they post.
    return module.is_awaited()


def _late_peers(module: Exchanging) -> list[int]:
    """Returns the peers that have not ended the forward, as far as known."""
    channel = module.calls_channel
    return [] if channel is None else channel.native.not_ended(module.forwards.number + 1)


def label_of(number: int, place: int) -> int:
    """Returns the label of call `place` in forward `number`, as messages carry it."""
    return (number & _FORWARDS) << _PLACE_BITS | place & _PLACES


def add_hooks(model: nn.Module, modules: Callable[[], Sequence[Exchanging]]) -> list[Any]:
    """Makes each forward of `model` a scope. torch.compile breaks its graph there.

    Args:
        model: model to add hooks to.
        modules: function that returns the modules that exchange. Without any there is no scope.

    Returns:
        The handles of the hooks.
    """
    scopes: dict[int, Scope] = {}  # by thread, which another one may not end
    beginning = Lock()  # of two threads, the second sees the scope of the first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(*_: object) -> None:
        with beginning:
            exchanging = modules()
            if exchanging:
                scopes[get_ident()] = Scope(exchanging, owner=scopes).__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(_: object, __: object, result: object) -> None:
        # torch calls it without a result while it handles the exception of a forward.
        error = sys.exc_info()[1] if result is None else None
        scope = scopes.pop(get_ident(), None)
        if scope is not None:
            scope.__exit__(None, error, None)

    return [
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end, always_call=True),
    ]
