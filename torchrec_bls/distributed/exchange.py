"""One direction of one module: a channel made at its first use, and its posts in order."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.rendezvous import Rendezvous
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.errors import ProtocolError

T = TypeVar("T")

# Room for messages larger than those of the first batch, whose size all that follows is guessed by.
_HEADROOM = 1.5
_SMALLEST_SLOT = 1 << 14


class Pending(Generic[T]):
    """A post whose messages are still to be collected."""

    def __init__(self, exchange: "Exchange", collect: Callable[[_native.Arrival], T]) -> None:
        self._exchange = exchange
        self._collect: Callable[[_native.Arrival], T] | None = collect
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = False

    def wait(self) -> T:
        """Returns what was collected, after completing this post and all older ones."""
        while not self._done:
            self._exchange.complete_oldest()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def complete(self, arrival: _native.Arrival) -> None:
        """Collects from `arrival` and lets go of what was posted."""
        assert self._collect is not None, "a post is completed once"
        self._result = self._collect(arrival)
        self._collect = None
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Makes every later `wait` raise `error`."""
        self._error = error
        self._done = True


class Exchange:
    """All-to-alls of one direction of one module, completed in the order of their posts.

    At most bound + 1 posts are outstanding: a further one completes the oldest first, whether or
    not somebody asked for its result yet.

    Args:
        group: ranks that exchange.
        config: of the sharder.
        name: unique among the exchanges of the group.
        on_failure: called with the reason when a post or its completion fails; `fail` unless given.
            The other ranks may be waiting for this one in another exchange of the same module.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: BLSConfig,
        name: str,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.channel: BoundedLagChannel | None = None
        self._group = group
        self._config = config
        self._on_failure = on_failure or self.fail
        self._pending: deque[Pending[Any]] = deque()

    @property
    def bound(self) -> int:
        """Iterations that ranks may be apart."""
        return self._config.bound

    @property
    def under_way(self) -> bool:
        """Whether a post is not completed yet."""
        return bool(self._pending)

    def open(self, message_bytes: int, batch: int) -> BoundedLagChannel:
        """Returns the channel. The first call makes it, collectively.

        Args:
            message_bytes: size of this rank's largest message of the first post.
            batch: this rank's batch size in it.
        """
        if self.channel is None:
            slot_bytes = self._config.slot_bytes or self._derive_slot_bytes(message_bytes, batch)
            self.channel = BoundedLagChannel(
                self._group,
                bound=self._config.bound,
                slot_bytes=slot_bytes,
                name=self.name,
                deadline=self._config.deadline,
                transport=self._config.transport,
                verbs=self._config.verbs,
            )
        return self.channel

    def fail(self, reason: str) -> None:
        """Fails this exchange on all ranks; those that are setting up its channel, too."""
        if self.channel is not None:
            self.channel.poison(reason)
            return
        slots_are_given = self._config.slot_bytes is not None
        name, phase = (self.name, "terms") if slots_are_given else (self._slots_name, "bytes")
        # Without a store nobody is setting up anything.
        with suppress(RuntimeError):
            Rendezvous(self._group, name, self._config.deadline).fail(phase, reason)

    @property
    def _slots_name(self) -> str:
        return f"{self.name} slots"

    def _derive_slot_bytes(self, message_bytes: int, batch: int) -> int:
        expected = self._config.expected_batch
        scale = max(1.0, expected / batch) if expected is not None and batch > 0 else 1.0
        wanted = int(message_bytes * scale * _HEADROOM) + _native.MIN_SLOT_BYTES
        rendezvous = Rendezvous(self._group, self._slots_name, self._config.deadline)
        records = rendezvous.exchange("bytes", {"bytes": wanted})
        return max(_SMALLEST_SLOT, *(int(record["bytes"]) for record in records))

    def post(
        self,
        send: Callable[[_native.Channel], object],
        collect: Callable[[_native.Arrival], T],
        own: Sequence[torch.Tensor],
    ) -> Pending[T]:
        """Posts through `send` and returns the handle whose `wait` returns what `collect` does.

        Args:
            send: posts exactly one message to each rank.
            collect: reads the arrival; called once, before its slots are released.
            own: tensors that the message to this rank itself is read from in place.
        """
        channel = self.channel
        assert channel is not None, "open comes before post"
        while len(self._pending) > channel.bound:
            self.complete_oldest()
        try:
            with channel.range("post"):
                send(channel.native)
        except Exception as error:
            # The other ranks count on this post.
            self._on_failure(str(error))
            raise
        channel.hold_until_release(own)
        channel.warn_if_pulled()
        pending = Pending(self, collect)
        self._pending.append(pending)
        return pending

    def complete_oldest(self) -> None:
        """Waits for the messages of the oldest post and collects them."""
        channel = self.channel
        assert channel is not None and self._pending, "a handle is pending until it is completed"
        pending = self._pending.popleft()
        try:
            with channel.wait() as arrival:
                try:
                    pending.complete(arrival.native)
                except ProtocolError as error:
                    raise channel.refuse(arrival, str(error)) from error
        except BaseException as error:
            pending.fail(error)
            if isinstance(error, Exception):
                self._on_failure(str(error))
            raise
