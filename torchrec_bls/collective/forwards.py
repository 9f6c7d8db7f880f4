"""The numbers of a module's forwards and calls, by which its messages are told apart.

docs/design/forwards.md has the rule and its reasons.
"""

import weakref
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch

from torchrec_bls.collective.channel import BoundedLagChannel

# A label has the low bits of a place in a forward, above them those of the forward's number, and on
# top whether autograd is on (csrc/channel/call_label.h). Ranks are never so far apart that equal
# bits could stand for others.
_PLACE_BITS = 8
_PLACES = (1 << _PLACE_BITS) - 1
_TRAINS_BIT = 31
_FORWARDS = (1 << _TRAINS_BIT - _PLACE_BITS) - 1
_CALLS = (1 << _TRAINS_BIT) - 1


class OpenScope(Protocol):
    """A scope, as its modules see it; see Scope."""

    thread: int
    is_left: bool
    all_raise: bool

    @property
    def is_own(self) -> bool:
        """Returns whether this thread is in it."""

    def admit(self) -> None:
        """Lets this thread call a module."""

    def make_way(self, owner: object) -> None:
        """Ends it if it was left open."""


@dataclass
class CallAhead:
    """A call outside of scopes, of which this rank may still owe rows.

    Attributes:
        trains: whether autograd was on.
        ctx: TorchRec's context of the call, which its caller holds; None: only its caller can go on
            with it.
        ids: awaitable of its ids.
    """

    trains: bool
    ctx: "weakref.ref[Any] | None" = None
    ids: Any = None


class Forwards:
    """The forwards of one module on this rank, and its calls in the present one.

    Attributes:
        ahead: calls outside of scopes by `call_of` their labels, until rows are sent.
        broke_off: whether nobody can make a call any more that peers count on. A forward had
            failed, and its pipeline was dropped or reset.
        now: number of the forward that is open or comes next, and the scope that is open, if any.
            It changes by one store: a signal may raise between any two.
    """

    def __init__(self) -> None:
        self.ahead: dict[int, CallAhead] = {}
        self.broke_off = False
        self._counted_on: int | None = None
        self.now: tuple[int, OpenScope | None] = (0, None)
        self._place = 0

    def call(self) -> int:
        """Returns the label of a call that begins. Outside of scopes it is a forward of its own.

        Raises:
            ValueError: the open scope is another thread's.
        """
        number, scope = self.now
        if scope is not None and (scope.is_left or scope.thread != get_ident()):
            scope.admit()
            number, scope = self.now
        trains = torch.is_grad_enabled()
        label = trains << _TRAINS_BIT | _first_call(number) | self._place & _PLACES
        if scope is None:
            self.ahead[call_of(label)] = CallAhead(trains)
            self.now = (number + 1, None)
        else:
            self._place += 1
        return label

    def follow(self, label: int) -> None:
        """Makes the next call of this forward the one of `label`, which a peer has begun."""
        self._place = label & _PLACES

    def keep(self, label: int, ctx: Any, ids: Any) -> None:
        """Keeps what a call of `ahead` is answered with, until its caller drops the context.

        TorchRec's pipelines drop that of a batch whose ids they post twice.
        """
        call = call_of(label)
        if (ahead := self.ahead.get(call)) is not None:
            ahead.ctx, ahead.ids = weakref.ref(ctx, lambda _: self._drop(call)), ids

    def answered(self, label: int) -> None:
        """Notes that this rank has sent the rows of a call, or that no rank will."""
        self.ahead.pop(label & _CALLS, None)

    def refuse(self) -> None:
        """Notes that all ranks raise for a call of the present forward, where they wait for ids."""
        if (scope := self.now[1]) is not None:
            scope.all_raise = True

    def fail_alone(self) -> None:
        """Notes that the present forward fails on this rank. Peers will make the call that was
        posted just before it. Older ones are made in it, or never."""
        newest = self.newest_ahead
        self._counted_on = newest if newest in self.ahead else None

    @property
    def newest_ahead(self) -> int:
        """Returns the call outside of scopes that came just before the present forward, if any."""
        return _first_call(self.now[0] - 1)

    def _drop(self, call: int) -> None:
        """Notes that nobody can make a call of `ahead` any more."""
        if self.ahead.pop(call, None) is not None and call == self._counted_on:
            self.broke_off = True

    def meet(self) -> None:
        """Counts from here on: the module's ranks have met, each in its present forward."""
        self.ahead.clear()
        self.broke_off = False
        self._place = 0
        self.now = (0, self.now[1])

    def begin(self, scope: OpenScope) -> None:
        """Begins a forward."""
        self.now = (self.now[0], scope)

    def end(self, scope: OpenScope) -> None:
        """Ends the forward of `scope`, unless it has ended."""
        number, open_scope = self.now
        if open_scope is scope:
            self._place = 0
            self.now = (number + 1, None)

    def undo(self, scope: OpenScope) -> None:
        """Takes back the beginning of `scope`."""
        number, open_scope = self.now
        if open_scope is scope:
            self.now = (number, None)


class Exchanging(Protocol):
    """A module whose calls may exchange messages. These carry the labels of `forwards`."""

    forwards: Forwards

    def joins_scopes(self) -> bool:
        """Returns whether a forward by this thread, which begins, is a scope of this module.

        Raises:
            ValueError: another thread is calling the module.
        """

    @property
    def calls_channel(self) -> BoundedLagChannel | None:
        """Returns the channel on which each call posts first; None until its ranks have met."""

    @property
    def deadline(self) -> float:
        """Returns the seconds that waits for other ranks may take."""

    def awaiting(self) -> list[int]:
        """Returns the ranks that wait for this one before they post: in their first call, by
        another plan, or for a larger `calls_channel`."""

    def meet(self) -> None:
        """Comes to these ranks. It posts nothing."""

    def take_part(self, trains: bool, refusal: str | None) -> None:
        """Takes part in the next call, without samples.

        Args:
            trains: whether the other ranks have autograd on in it.
            refusal: reason why no rank may get rows; None: all get them.
        """

    def is_asked_ahead(self) -> bool:
        """Returns whether a peer has sent rows of a call that this rank owes its own, since ids
        were posted ahead."""

    def answer_ahead(self) -> None:
        """Sends the rows of the call that `is_asked_ahead` has found."""

    def fail(self, reason: str) -> None:
        """Fails the module on all ranks."""


def call_of(label: int) -> int:
    """Returns the call that a label names: forward and place. Ranks may differ in the rest."""
    return label & _CALLS


def _first_call(number: int) -> int:
    return (number & _FORWARDS) << _PLACE_BITS


def is_of_forward(label: int, number: int) -> bool:
    """Returns whether a call belongs to a forward."""
    return label >> _PLACE_BITS & _FORWARDS == number & _FORWARDS


def is_in_training(label: int) -> bool:
    """Returns whether autograd is on in a call."""
    return bool(label >> _TRAINS_BIT)
