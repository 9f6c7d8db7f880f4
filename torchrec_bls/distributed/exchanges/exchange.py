"""The exchange of one direction of one module: a channel made at first use, and posts in order."""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.ordered_window import OrderedWindow
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.errors import ProtocolError, RendezvousError, named
from torchrec_bls.slot_size import HEADROOM, SMALLEST_SLOT_BYTES, wanted_slot_bytes

T = TypeVar("T")

# A single huge batch is no reason to reserve so much memory in every slot.
_PULLED_BEFORE_GROWTH = 8


class Pending(Generic[T]):
    """A post whose messages are still to be collected.

    Attributes:
        channel: channel that the post went through.
        sequence: sequence number of the post in the channel.
    """

    def __init__(
        self,
        exchange: "Exchange",
        channel: BoundedLagChannel,
        collect: Callable[[_native.Arrival], T],
    ) -> None:
        self.channel = channel
        self.sequence = channel.native.posted
        self._exchange = exchange
        self._collect: Callable[[_native.Arrival], T] | None = collect
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = False

    def wait(self) -> T:
        """Returns the collected result, after completing this post and all older ones."""
        while not self._done:
            self._exchange.complete_oldest()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def receive(self, arrival: _native.Arrival) -> None:
        """Collects from `arrival` and frees what was posted; see UnderWay.

        Raises:
            ProtocolError: the arrival belongs to another post, and so do its rows.
        """
        assert self._collect is not None, "a post is completed once"
        if arrival.sequence != self.sequence:
            raise ProtocolError(
                f"sequence {arrival.sequence} arrived for what was posted as {self.sequence}: an "
                "interrupted call left this rank's posts and waits apart. Start the ranks again"
            )
        self._result = self._collect(arrival)
        self._collect = None
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Makes every later `wait` raise `error`."""
        self._error = error
        self._done = True


class Exchange:
    """All-to-alls of one direction of one module, completed in the order of their posts.

    At most bound + 1 posts are outstanding. A further post completes the oldest first, even if
    nobody has asked for its result yet.

    Args:
        group: ranks that exchange.
        config: configuration of the sharder.
        name: name, unique among the exchanges of the group.
        on_failure: function called with the reason when a post or its completion fails; by default
            `fail`. The other ranks may be waiting for this one in another exchange of the module.
        deadline: deadline of the module; that of `config` by default.
        session_of: function that returns the session of the module's agreement.

    Attributes:
        channel: channel that posts go through; None before the first post.
        expected_batch: largest batch per rank that slots should have room for.
        growth_is_due: whether the ranks have agreed on larger slots and not made them yet.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: BLSConfig,
        name: str,
        on_failure: Callable[[str], None] | None = None,
        deadline: Deadline | None = None,
        session_of: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self.channel: BoundedLagChannel | None = None
        self.expected_batch = config.expected_batch
        self.growth_is_due = False
        self._group = group
        self._config = config
        self._deadline = deadline or Deadline(config.deadline, group)
        self._on_failure = on_failure or self.fail
        self._session_of = session_of
        self._window: OrderedWindow[Pending[Any]] = OrderedWindow(config.bound)
        self._slot_bytes = 0
        self._grows = config.slot_bytes is None
        self._pulled_posts = 0
        self._posted = 0
        self._completed = 0
        # Older channels. Each has a number of posts: when so many are completed, all ranks have
        # finished with the channel.
        self._retired: deque[tuple[BoundedLagChannel, int]] = deque()

    @property
    def bound(self) -> int:
        """Returns the number of iterations that ranks may be apart."""
        return self._config.bound

    @property
    def under_way(self) -> bool:
        """Returns whether a post is not completed yet."""
        return bool(self._window.posts)

    def open(self, message_bytes: int, batch: int, slot_bytes: int = 0) -> BoundedLagChannel:
        """Returns the channel. The first call makes it, collectively.

        Args:
            message_bytes: size of this rank's largest message in the first post.
            batch: this rank's batch size in the first post.
            slot_bytes: size that all ranks have agreed on since; a channel with smaller slots is
                replaced, collectively.
        """
        if self.channel is None:
            self._slot_bytes = max(slot_bytes, self._first_slot_bytes(message_bytes, batch))
            self.channel = self._make_channel(self._slot_bytes)
            self.growth_is_due = False
        elif not self.has_slots(slot_bytes):
            self._grow(self.channel, slot_bytes)
        return self.channel

    def has_slots(self, slot_bytes: int) -> bool:
        """Returns whether slots are large enough already, so that `open` has nothing to do."""
        return self.channel is not None and (slot_bytes <= self._slot_bytes or not self._grows)

    @property
    def wanted_slot_bytes(self) -> int:
        """Returns the size of slots that this rank's messages need; 0: the slots are large
        enough."""
        if self.channel is None or not self._grows or self._pulled_posts < _PULLED_BEFORE_GROWTH:
            return 0
        return int(self.channel.native.stats().largest_message * HEADROOM)

    def fail(self, reason: str) -> None:
        """Fails this exchange on all ranks, including ranks that are setting up its channel."""
        for channel in (self.channel, *(channel for channel, _ in self._retired)):
            if channel is not None:
                channel.poison(reason)
        if self.channel is None or self.growth_is_due:
            slots_are_known = self._config.slot_bytes is not None or self.channel is not None
            # Without a store no rank is setting up anything.
            with suppress(RuntimeError):
                self._rendezvous(self.name if slots_are_known else self._slots_name).fail(reason)

    def is_awaited(self) -> bool:
        """Returns whether another rank makes the channel, and waits for this one."""
        name = self.name if self._config.slot_bytes is not None else self._slots_name
        return self.channel is None and self._rendezvous(name).is_awaited()

    def _rendezvous(self, name: str) -> Rendezvous:
        return Rendezvous(self._group, name, self._deadline.seconds, session=self._session_of())

    @property
    def _slots_name(self) -> str:
        return f"{self.name} slots"

    def _first_slot_bytes(self, message_bytes: int, batch: int) -> int:
        if self._config.slot_bytes is not None:
            return self._config.slot_bytes
        expected = self.expected_batch
        scale = max(1.0, expected / batch) if expected is not None and batch > 0 else 1.0
        wanted = wanted_slot_bytes(message_bytes * scale)
        rendezvous = self._rendezvous(self._slots_name)
        records = rendezvous.exchange("bytes", {"bytes": wanted})
        return max(SMALLEST_SLOT_BYTES, *(int(record["bytes"]) for record in records))

    def _make_channel(self, slot_bytes: int) -> BoundedLagChannel:
        return BoundedLagChannel(
            self._group,
            bound=self._config.bound,
            slot_bytes=slot_bytes,
            name=self.name,
            deadline=self._deadline.seconds,
            transport=self._config.transport,
            verbs=self._config.verbs,
            rendezvous=self._rendezvous(self.name),
        )

    def _grow(self, old: BoundedLagChannel, slot_bytes: int) -> None:
        """Replaces the channel by one with larger slots. If one rank has no memory, no rank
        does."""
        channel, failure = None, ""
        try:
            channel = self._make_channel(slot_bytes)
        except RendezvousError as error:
            failure = str(error)
        rendezvous = self._rendezvous(f"{self.name} growth")
        failures = [r["failure"] for r in rendezvous.exchange("made", {"failure": failure})]
        self._pulled_posts = 0
        self.growth_is_due = False
        if channel is None or any(failures):
            self._grows = False
            if channel is not None:
                channel.close()
            reason = next(filter(None, failures))
            if self._group.rank() == 0:  # all ranks know the same
                warnings.warn(
                    f"{self.name}: messages outgrew their slots, which cannot be enlarged "
                    f"({reason}). Larger messages go on being pulled, which is slower",
                    stacklevel=2,
                )
            return
        # A rank that has posted so much to the new channel has completed all posts of the old one.
        self._retired.append((old, self._posted + self._config.bound + 1))
        self.channel, self._slot_bytes = channel, slot_bytes

    def make_room(self) -> None:
        """Completes old posts until a further post is possible."""
        while self._window.is_full:
            self.complete_oldest()

    def post(
        self,
        send: Callable[[_native.Channel], object],
        collect: Callable[[_native.Arrival], T],
        own: Sequence[torch.Tensor],
        label: int,
    ) -> Pending[T]:
        """Posts through `send`. Returns a handle whose `wait` returns the result of `collect`.

        Args:
            send: function that posts exactly one message to each rank.
            collect: function that reads the arrival; called once, before its slots are released.
            own: tensors that hold the message to this rank itself; it is read in place.
            label: label of the call, see Forwards. Receivers compare it with their own: no post is
                missing.
        """
        channel = self.channel
        assert channel is not None, "open comes before post"
        self.make_room()
        pulled = channel.native.pulled_messages
        # A signal may raise between any two lines. Any interruption fails the exchange, so that no
        # rank counts on messages that have left without a handle.
        try:
            pending = Pending(self, channel, collect)
            channel.native.label(label)
            channel.hold_until_release(own)
            self._window.post(pending, send)
            self._posted += 1
        except BaseException as error:
            # The other ranks expect this post.
            self._on_failure(_reason(error))
            raise
        if channel.native.pulled_messages != pulled:
            self._note_pulled(channel)
        return pending

    def _note_pulled(self, channel: BoundedLagChannel) -> None:
        self._pulled_posts += 1
        if self._config.slot_bytes is not None:
            channel.warn_if_pulled()

    def complete_oldest(self) -> None:
        """Waits for the messages of the oldest post and collects them."""
        posts = self._window.posts
        assert posts, "a handle is pending until it is completed"
        pending = posts[0]
        try:
            self._window.complete_oldest()
            self._completed += 1
            while self._retired and self._retired[0][1] <= self._completed:
                self._retired.popleft()[0].close()
        except BaseException as error:
            pending.fail(error)
            if posts and posts[0] is pending:
                posts.popleft()
            self._on_failure(_reason(error))
            raise


def _reason(error: BaseException) -> str:
    """Returns the reason for the other ranks."""
    return str(error) if isinstance(error, Exception) else named(error)
