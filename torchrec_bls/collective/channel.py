"""The Python interface of the bounded-lag channel."""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from torchrec_bls import _native
from torchrec_bls._deprecated import new_transport, with_old_names
from torchrec_bls.collective.gloo_groups import keep_groups, let_calls_end
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.collective.transport.rendezvous import Rendezvous, host_identity, require_equal
from torchrec_bls.collective.transport.set_up import TRANSPORTS, set_up
from torchrec_bls.collective.transport.shape import Shape
from torchrec_bls.collective.transport.verbs_config import VerbsConfig
from torchrec_bls.errors import ChannelClosedError, ProtocolError, named
from torchrec_bls.lifetime import Living, When, at_exit, do_all, in_forked_child

_MUST_AGREE = {
    "package": "Install one version of torchrec-bls on all ranks",
    "wire_version": "Install one version of torchrec-bls on all ranks",
    "world_size": "Create the channel over the same process group on all ranks",
    "bound": "Give every rank the same bound",
    "slot_bytes": "Give every rank the same slot_bytes",
    "transport": "Give every rank the same transport",
}

_DEADLINE_NAME = "the channel's argument deadline"

# Every call asks it.
_profiler_runs = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

P = ParamSpec("P")
R = TypeVar("R")
_Number = TypeVar("_Number", int, float)

# Found at import: a rank that has run out of descriptors could not find it.
_PACKAGE_VERSION = metadata.version("torchrec-bls")

_channels: "Living[BoundedLagChannel]" = Living()


@at_exit(When.CHANNELS)
def _close_all() -> None:
    # A thread that is still in a wait must leave it while there is an interpreter to return to.
    do_all(channel.close for channel in _channels)


@in_forked_child
def _abandon_all() -> None:
    do_all(partial(abandon, channel) for channel in _channels)


at_exit(When.GLOO)(let_calls_end)
in_forked_child(keep_groups)


@dataclass(frozen=True)
class ChannelStats:
    """The counters of a channel on this rank so far.

    Attributes:
        messages: number of messages sent to other ranks.
        bytes: payload of these messages.
        pulled_messages: number of these messages that exceeded a slot, so that the receiver fetched
            them.
        largest_message: bytes that a slot needs to hold the largest message.
        wait_seconds: time waited for each peer, by rank. Waits of about a microsecond count as 0.
        lag_histogram: number of waits for a peer in which this rank was `index` iterations ahead of
            it.
        slot_bytes: size of a slot.
        ring_bytes: memory of this rank's slots: world size x 2(bound + 1) x slot_bytes.
        seconds: time in which this was counted, from the channel's creation on.
    """

    messages: int
    bytes: int
    pulled_messages: int
    largest_message: int
    wait_seconds: list[float]
    lag_histogram: list[int]
    slot_bytes: int
    ring_bytes: int
    seconds: float

    def since(self, earlier: "ChannelStats") -> "ChannelStats":
        """Returns the counters since `earlier` of the same channel; sizes are the present ones."""
        return replace(
            self,
            messages=self.messages - earlier.messages,
            bytes=self.bytes - earlier.bytes,
            pulled_messages=self.pulled_messages - earlier.pulled_messages,
            wait_seconds=_differences(self.wait_seconds, earlier.wait_seconds),
            lag_histogram=_differences(self.lag_histogram, earlier.lag_histogram),
            seconds=self.seconds - earlier.seconds,
        )


class Arrival:
    """The messages of one sequence number from all ranks. They stay in their slots until
    released."""

    def __init__(self, channel: "BoundedLagChannel", native: _native.Arrival) -> None:
        self._channel = channel
        self.native = native
        # The present number: the native object stands for a later arrival once its slots are used
        # again.
        self.sequence = native.sequence

    def parts(self, source: int) -> list[memoryview]:
        """Returns the parts that rank `source` sent, as uint8 views valid until `release`. Their
        memory stays until then, even if the channel and this object are gone."""
        self._check()
        return [self.native.view(source, i) for i in range(self.native.part_count(source))]

    def tensor(self, source: int, part: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a part as a flat tensor of `dtype` in its slot, valid until `release`. Its memory
        stays until then, even if the channel and this object are gone."""
        self._check()
        view = self.native.view(source, part)
        if view.nbytes == 0:
            return torch.empty(0, dtype=dtype)
        if view.nbytes % dtype.itemsize:
            raise ValueError(
                f"part {part} from {self._channel.names.of(source)} has {view.nbytes} bytes, "
                f"which is no multiple of {dtype}'s {dtype.itemsize}"
            )
        return torch.frombuffer(view, dtype=dtype)

    def release(self) -> None:
        """Gives the slots back to their senders. Release arrivals in the order of waiting.

        Raises:
            ValueError: an older arrival is not released yet.
        """
        self._channel.native.release(self.sequence, self._channel.own)

    @property
    def _released(self) -> bool:
        return self._channel.native.released > self.sequence

    def _check(self) -> None:
        if self._released:
            raise ValueError(
                f"the messages of sequence {self.sequence} were released: read them before release"
            )
        check_not_abandoned(self._channel)

    def __enter__(self) -> "Arrival":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@with_old_names
class BoundedLagChannel:
    """All-to-all-v among the ranks of a group that may be up to `bound` iterations apart.

    A rank may have `bound` + 1 posts outstanding. `wait` completes the oldest. Messages travel by
    one-sided puts into slots, together with their sizes. Each ordered pair of ranks has
    2(bound + 1) slots (docs/design/channel.md). The idea is section III of the bounded-lag paper,
    whose `bound` slots are not enough. Only one thread at a time may use a channel, but `close` and
    `stats` may come from any thread.

    Creation is collective: all ranks of the group create their channels in the same order.

    Args:
        group: a process group of at most 65,535 ranks.
        bound: iterations that ranks may be apart; 0 is synchronous.
        slot_bytes: size that a message and its header (at most 256 bytes) should fit in. Larger
            messages work, but are slower.
        name: name of the channel in errors, traces and statistics.
        deadline: seconds after which waiting for a peer is an error.
        transport: "shm" is shared memory, for the ranks of one host; "verbs" is RDMA for all;
            "tcp" is TCP for all; "auto" is shared memory among the ranks of a host, and RDMA
            between hosts, or TCP where a host has no RDMA.
        verbs: options of RDMA devices; None: as the environment variables say.
        rendezvous: place where the ranks meet; None: one for this name.

    Attributes:
        rank: this rank's number in the group.
        world_size: number of ranks in the group.

    Raises:
        ValueError: an argument is out of range.
        RendezvousError: the ranks disagree, some do not come, memory is short, or an RDMA device is
            needed and missing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        bound: int = 0,
        slot_bytes: int,
        name: str = "channel",
        deadline: float = 60.0,
        transport: str = "auto",
        verbs: VerbsConfig | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        check_bound(bound)
        check_slot_bytes(slot_bytes)
        check_deadline(deadline)
        transport = known_transport(transport)
        self.name = name
        self.bound = bound
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        # Objects with the memory of this rank's messages to itself, by sequence number, until they
        # are released.
        self.own: dict[int, object] = {}
        self._pulled_seen = 0
        self._abandoned = False
        slots = 2 * (bound + 1)
        rendezvous = rendezvous or Rendezvous(group, name, deadline, _DEADLINE_NAME)
        self.names = rendezvous.names  # of the ranks in errors
        self._where = f"channel '{name}' on {self.names.of(self.rank)}"
        hosts = self._agree(rendezvous, slot_bytes, transport)
        shape = Shape(name, self.rank, hosts, slots, slot_bytes, deadline, self.names.every)
        self.native = _native.Channel(
            set_up(rendezvous, shape, transport, verbs),
            self.rank,
            self.world_size,
            bound,
            slots,
            deadline,
            name,
            len(shape.local_ranks),
            shape.names,
            rendezvous.deadline_name,
        )
        self.native.keep(self.own)
        self._created = time.monotonic()
        _channels.add(self)

    def _agree(self, rendezvous: Rendezvous, slot_bytes: int, transport: str) -> list[str]:
        """Returns the hosts of all ranks, if all ranks want the same channel."""
        with rendezvous.own_part():
            host = host_identity()
        record = {
            "package": _PACKAGE_VERSION,
            "wire_version": _native.WIRE_VERSION,
            "world_size": self.world_size,
            "bound": self.bound,
            "slot_bytes": slot_bytes,
            "transport": transport,
            "host": host,
        }
        records = rendezvous.exchange("terms", record)
        require_equal(self.name, records, _MUST_AGREE, rendezvous.names)
        return [record["host"] for record in records]

    def post(self, parts: Sequence[Sequence[torch.Tensor]]) -> int:
        """Sends `parts[d]` to rank d without waiting for anyone.

        The memory may be reused when this returns, except `parts[rank]`, this rank's own part. That
        one is not copied, and has to stay unchanged until its arrival is released.

        Args:
            parts: list of up to 16 CPU tensors for each rank, of any dtype, contiguous or 2-D with
                contiguous rows. Receivers see each tensor as one run of bytes.

        Returns:
            The sequence number, counted from 0.

        Raises:
            ValueError: a tensor is unsuitable, or bound + 1 posts are not released yet.
            BLSError: a rank failed or died.
        """
        posted = self.native.posted
        try:
            if _profiler_runs():
                with profiler_range(self, "post"):
                    self.native.post(parts, self.own)
            else:
                self.native.post(parts, self.own)
            if self.native.pulled_messages != self._pulled_seen:
                warn_if_pulled(self)
        except BaseException as error:
            if self.native.posted != posted:
                self._fail_unnoticed("post", error)
            raise
        return posted

    def wait(self) -> Arrival:
        """Waits for the messages of the oldest post that is not completed yet.

        Raises:
            ValueError: nothing is posted.
            PeerTimeoutError: the deadline passed; the text names the missing ranks.
            PeerDiedError, PeerClosedError, ProtocolError, PoisonedError: see errors.py.
        """
        completed = self.native.completed
        try:
            if not _profiler_runs():
                return Arrival(self, self.native.wait())
            with profiler_range(self, "wait"):
                return Arrival(self, self.native.wait())
        except BaseException as error:
            if self.native.completed != completed:
                self._fail_unnoticed("wait", error)
            raise

    def _fail_unnoticed(self, action: str, error: BaseException) -> None:
        """Fails the channel if a signal's handler or a warning raised right after a finished call.
        The caller doesn't know that the call was done. It would take every later message for the
        one before."""
        self.poison(f"{named(error)}, right after a {action}")

    def stats(self) -> ChannelStats:
        """Returns this rank's counters."""
        native = self.native.stats()
        return ChannelStats(
            messages=native.messages,
            bytes=native.bytes,
            pulled_messages=native.pulled_messages,
            largest_message=native.largest_message,
            wait_seconds=native.wait_seconds,
            lag_histogram=native.lag_histogram,
            slot_bytes=self.native.slot_bytes,
            ring_bytes=self.native.ring_bytes,
            seconds=time.monotonic() - self._created,
        )

    def poison(self, reason: str) -> None:
        """Makes all ranks raise PoisonedError, naming this rank and `reason`. A closed channel
        ignores it."""
        # The text of an exception may have a file name that is not UTF-8.
        self.native.poison(reason.encode(errors="replace").decode())

    def close(self) -> None:
        """Ends the channel for this rank. Peers that wait for more than it posted raise
        PeerClosedError. Messages that peers have yet to pull are kept until they have, at most
        until the deadline. Closing twice does nothing.

        An exception of a signal's handler, such as KeyboardInterrupt, ends the waiting. The channel
        is then closed as well, and has failed on all ranks.
        """
        self.native.close()

    def __enter__(self) -> "BoundedLagChannel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self.poison(named(error))
        finally:
            self.close()


# What the rest of the package does with a channel, and a user does not.


def hold_until_release(channel: BoundedLagChannel, tensors: Sequence[torch.Tensor]) -> None:
    """Keeps the tensors alive that the next post, through `native`, sends to this rank itself. They
    stay until that message is released."""
    channel.own[channel.native.posted] = tensors


def in_range(
    channel: BoundedLagChannel,
    action: str,
    call: Callable[P, R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Returns the result of a call. If a profiler runs, it sees the call as a range that names
    channel, action and lag."""
    if not _profiler_runs():
        return call(*args, **kwargs)
    with profiler_range(channel, action):
        return call(*args, **kwargs)


def profiler_range(channel: BoundedLagChannel, action: str) -> AbstractContextManager[object]:
    """Returns a profiler range that names channel, action and lag."""
    # Number of iterations that this rank is ahead of the one it completes next.
    posted, completed = channel.native.posted, channel.native.completed
    lag = max(0, posted - completed - (action == "wait"))
    sequence = posted if action == "post" else completed
    return record_function(
        f"bls::{channel.name} {action} seq={sequence} lag={lag} bound={channel.bound}"
    )


def warn_if_pulled(channel: BoundedLagChannel) -> None:
    """Warns, once per channel, that messages do not fit the slots."""
    pulled = channel.native.pulled_messages
    if pulled == channel._pulled_seen:
        return
    if channel._pulled_seen == 0:
        needed = channel.native.stats().largest_message
        warnings.warn(
            f"{channel._where}: a message needs {needed} bytes and "
            f"slots have {channel.native.slot_bytes}; larger messages are pulled, which is "
            f"slower. Set slot_bytes to at least {needed}, or expected_batch to the largest "
            "batch",
            stacklevel=3,
        )
    channel._pulled_seen = pulled


def refuse(
    channel: BoundedLagChannel, arrival: Arrival | _native.Arrival, reason: str
) -> ProtocolError:
    """Fails the channel on all ranks because of what `arrival` holds. Returns the error to
    raise."""
    lag = channel.native.posted - 1 - arrival.sequence
    channel.poison(reason)
    return ProtocolError(f"{channel._where}, sequence {arrival.sequence}, lag {lag}: {reason}")


def abandon(channel: BoundedLagChannel) -> None:
    """Makes further use of the channel in a forked child raise ChannelClosedError. The child shares
    nothing with the peers."""
    channel._abandoned = True
    channel.native.abandon()


def check_not_abandoned(channel: BoundedLagChannel) -> None:
    """Raises ChannelClosedError in a forked child."""
    if channel._abandoned:
        raise ChannelClosedError(
            f"{channel._where} belongs to the process that made it: "
            "its messages are not there in a forked child. Copy them before the fork"
        )


def check_bound(bound: int) -> None:
    """Raises ValueError unless `bound` is a number of iterations."""
    if not isinstance(bound, int) or isinstance(bound, bool) or not 0 <= bound <= 1 << 16:
        raise ValueError(
            f"bound is {bound!r}, but must be a number of iterations from 0 (synchronous) to 65536"
        )


def check_slot_bytes(slot_bytes: int) -> None:
    """Raises ValueError unless `slot_bytes` is a possible size of a slot."""
    least, most = _native.MIN_SLOT_BYTES, _native.MAX_SLOT_BYTES
    if not isinstance(slot_bytes, int) or isinstance(slot_bytes, bool) or slot_bytes > most:
        raise ValueError(
            f"slot_bytes is {slot_bytes!r}, but must be a number of bytes, at most {most}: use "
            f"{least} plus the usual message size"
        )
    if slot_bytes < least:
        raise ValueError(
            f"slot_bytes is {slot_bytes}, but a message header alone may take {least}: use at "
            "least that plus the usual message size"
        )


def known_transport(transport: str) -> str:
    """Returns the name of a transport, the new one for an old one. Raises ValueError if there is
    none of this name."""
    transport = new_transport(transport)
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport is {transport!r}, but has to be one of {', '.join(TRANSPORTS)}"
        )
    return transport


def _differences(now: Sequence[_Number], before: Sequence[_Number]) -> list[_Number]:
    return [a - b for a, b in zip(now, before, strict=True)]
