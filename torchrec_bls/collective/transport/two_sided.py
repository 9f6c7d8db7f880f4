"""A channel over torch.distributed, where sender and receiver take part: transport "c10d".

See docs/design/two-sided.md.
"""

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchrec_bls import _native
from torchrec_bls.collective.transport.gloo_threads import loop_threads, stop_preempting
from torchrec_bls.collective.transport.in_time import TooLateError, within
from torchrec_bls.collective.transport.rounds import (
    FOREVER,
    PAUSE,
    CollectiveRounds,
    PairwiseRounds,
    Rounds,
    other_carrier,
)
from torchrec_bls.collective.transport.sender import Sender
from torchrec_bls.collective.transport.shape import Shape
from torchrec_bls.collective.transport.sockets import close_sockets, tcp_sockets
from torchrec_bls.errors import PeerTimeoutError, RendezvousError, TransportError
from torchrec_bls.lifetime import Living, When, at_exit, do_all, in_forked_child

# Seconds that telling others of a failure may take, and how many of them in the failing call. Also
# seconds that a failed exchange may take to end after a peer is gone.
_TELLING = 0.5
_TELLING_IN_CALL = 0.1
_SETTLING = 1.0
_LINE = 64  # bytes of a cache line; slots are multiples of it
# Seconds between two looks for a failure of another rank, while a large message comes.
_WATCH = 0.02

# The subject of a note. The note's number is a count of messages, or the rank that failed first.
_ABOUT = range(9)
_POSTED, _ASKED, _READ, _CLOSED, _POISON, _POISON_KNOWN, _LEFT, _ASKED_END, _ENDED = _ABOUT
_TEXT_BYTES = 1000
_NOTE = struct.Struct(f"<qqq{_TEXT_BYTES}s")  # about, number, bytes of the text, text

# Tags of point-to-point messages. Messages larger than a slot have one tag for each slot.
_NOTES, _NEVER_SENT, _ROUNDS, _FIRST_SLOT = 0, 1, 2, 3

_messengers: "Living[TwoSidedMessenger]" = Living()
_threads: list[threading.Thread] = []


@at_exit(When.TRANSPORTS)
def _end_all() -> None:
    # The thread that was the last to hold its messenger is still closing connections. It does so in
    # C++, which must come back to an interpreter.
    joins = [partial(thread.join, _SETTLING) for thread in _threads]
    do_all([*(messenger.end for messenger in _messengers), *joins])


@in_forked_child
def _abandon_all() -> None:
    do_all(messenger.abandon for messenger in _messengers)


class TwoSidedMessenger:
    """Moves the slots of a channel. The native transport calls it. Its own threads call the
    transport's inbox.

    Args:
        shape: shape of the channel.

    Raises:
        RendezvousError: there is no memory for the slots.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._peers = [rank for rank in range(shape.world_size) if rank != shape.rank]
        self._process = os.getpid()
        slot_bytes = -(-shape.slot_bytes // _LINE) * _LINE
        size = (shape.slots, shape.world_size, slot_bytes)
        try:
            self._outboxes = torch.zeros(size, dtype=torch.uint8)
            self._inboxes = torch.zeros(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise RendezvousError(
                f"no memory for slots: {error}. Use a smaller slot_bytes"
            ) from error
        self._inbox = _native.TwoSidedInbox(
            shape.rank, shape.world_size, shape.slots, slot_bytes, self._inboxes
        )
        self._started = 0
        self._left = False
        self._silent: set[int] = set()  # peers from which nothing more comes
        self._knowing_poison: set[int] = set()
        self._teller: threading.Thread | None = None
        self._notes: SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = SimpleQueue()
        # Memory of messages that are larger than a slot, by peer and slot.
        self._exposed: dict[tuple[int, int], torch.Tensor] = {}
        self._pulled: dict[tuple[int, int], torch.Tensor] = {}
        self._to_send: list[tuple[int, torch.Tensor]] = []
        self._sending: dict[tuple[int, int], dist.Work] = {}

    def connect(self, group: dist.ProcessGroup, store: Store) -> None:
        """Connects the ranks, collectively.

        Args:
            group: group of the channel.
            store: store for the ranks of this channel alone.

        Raises:
            RendezvousError: gloo could not connect them.
        """
        before, threads = tcp_sockets(), loop_threads()
        self._own = _own_group(store, self._shape)
        # A socket that another thread opened meanwhile may be among them.
        self._sockets = dict(tcp_sockets().items() - before.items())
        stop_preempting(loop_threads() - threads)
        self._sender = Sender(self._start, self._inbox.failed)
        self._rounds = self._rounds_over(other_carrier(group))
        self._notes_thread = self._start(self._keep_notes, "notes")
        self._listeners = {
            peer: self._start(partial(self._listen, peer), f"rank {peer}") for peer in self._peers
        }
        _messengers.add(self)

    def transport(self) -> _native.TwoSidedTransport:
        """Returns the transport, for one channel."""
        return _native.TwoSidedTransport(self, self._inbox, self._outboxes)

    def _rounds_over(self, carrier: dist.ProcessGroup | None) -> Rounds:
        slots = (self._shape, self._outboxes, self._inboxes, self._inbox, self._start)
        if carrier is not None:
            return CollectiveRounds(carrier, *slots)
        return PairwiseRounds(self._own, _ROUNDS, self._sender, *slots)

    def exchange(self, slot: int, sequence: int, sizes: list[int]) -> None:
        """Starts the exchange of a round of slots. `sizes` are the bytes in use, by rank."""
        self._started = sequence + 1
        self._rounds.exchange(slot, sequence, sizes)
        if self._to_send:
            self._sender.put(partial(self._send_large, slot, self._to_send))
            self._to_send = []

    def _send_large(self, slot: int, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        for peer, message in messages:
            with suppress(RuntimeError):  # the peer's listener reports that it is gone
                self._sending[peer, slot] = self._own.send([message], peer, _FIRST_SLOT + slot)

    def expose(self, destination: int, slot: int, size: int) -> torch.Tensor:
        """Returns memory that is sent beside the next exchange of the slot."""
        # The former content has been pulled, or this slot could not be used again.
        self._sending.pop((destination, slot), None)
        message = _memory(self._exposed, (destination, slot), size)
        self._to_send.append((destination, message))
        return message

    def retract(self, destination: int, slot: int) -> None:
        """Frees the memory of `expose`."""
        self._sending.pop((destination, slot), None)
        self._exposed.pop((destination, slot), None)

    def pull(self, source: int, slot: int, size: int) -> torch.Tensor:
        """Waits for the memory that `source` exposed and returns its copy here.

        Raises:
            PeerTimeoutError: the memory did not come within the deadline.
            TransportError: the memory won't come.
        """
        message = _memory(self._pulled, (source, slot), size)
        faults: list[str] = []

        def receive() -> None:
            try:
                self._own.recv([message], source, _FIRST_SLOT + slot).wait(FOREVER)
            except RuntimeError as error:
                faults.append(str(error))

        # Signals and failures of other ranks do not end a wait of gloo. They end a wait for a
        # thread.
        receiving = self._start(receive, f"message of rank {source}")
        end = time.monotonic() + self._shape.deadline
        while receiving.is_alive():
            receiving.join(_WATCH)
            if self._inbox.poisoned and receiving.is_alive():
                raise TransportError("a rank failed meanwhile")
            if time.monotonic() >= end and receiving.is_alive():
                raise PeerTimeoutError(f"it did not come within {self._shape.deadline} s")
        if faults:
            self._listeners[source].join(_SETTLING)  # it ends when `source` is gone
            raise TransportError(faults[0])
        return message

    def drop(self, source: int, slot: int) -> None:
        """Frees the memory of `pull`."""
        self._pulled.pop((source, slot), None)

    def return_credit(self, source: int, consumed: int) -> None:
        """Tells `source` how many of its messages this rank has read."""
        self._sender.put(partial(self._tell, source, _READ, consumed))

    def ask(self, peer: int) -> None:
        """Makes `peer` say how many messages it has posted."""
        self._tell(peer, _ASKED)

    def ask_for_end(self, peer: int) -> None:
        """Makes `peer` tell its end: a number of the channel's, see the native Transport."""
        self._tell(peer, _ASKED_END)

    def spread_poison(self, origin: int, message: bytes) -> None:
        """Tells all peers that a rank failed. Most peers know when it returns; `leave` waits longer
        for slow ones."""
        if self._left:
            return  # nobody listens any more
        # A signal that comes meanwhile must not skip the rest.
        self._teller = self._start(partial(self._tell_poison, origin, message), "poison")
        self._teller.join(_TELLING_IN_CALL)

    def _tell_poison(self, origin: int, message: bytes) -> None:
        for peer in self._peers:
            self._tell(peer, _POISON, origin, message)
        end = time.monotonic() + _TELLING
        while any(map(self._is_heard, self._unknowing())) and time.monotonic() < end:
            time.sleep(PAUSE)

    def _unknowing(self) -> set[int]:
        return {*self._peers} - self._knowing_poison

    def _is_heard(self, peer: int) -> bool:
        """Returns whether more may come from `peer`: it has not left and is not gone."""
        return self._listeners[peer].is_alive()

    def close(self, posted: int) -> None:
        """Tells all peers that no further message comes. Lets messages under way leave while any
        peer can take them."""
        self._sender.drain(self._shape.deadline)
        for peer in self._peers:
            self._tell(peer, _ENDED, self._inbox.told_end)
            self._tell(peer, _CLOSED, posted)
        self._rounds.flush(time.monotonic() + self._shape.deadline)

    def leave(self) -> None:
        """Tells all peers that no note follows. Threads that wait for peers end when these have
        left as well."""
        if self._teller is not None:
            self._teller.join()
        self._sender.stop(_TELLING)
        for peer in self._peers:
            self._tell(peer, _LEFT)
        self._rounds.stop()
        self._notes.put(None)
        if not self._inbox.poisoned:
            self._notes_thread.join(_TELLING)
        self._left = True
        self._disconnect_if_done()

    def abandon(self) -> None:
        """Closes the connections in a forked child: its copies would hide the end of its parent."""
        close_sockets(self._sockets)

    def end(self) -> None:
        """Ends all threads at the end of the process: what they wait for does not come any more."""
        threads = [*self._rounds.threads(), self._notes_thread, *self._listeners.values()]
        if os.getpid() != self._process or not any(thread.is_alive() for thread in threads):
            return
        self._disconnect()
        end = time.monotonic() + _SETTLING
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _disconnect_if_done(self) -> None:
        """Ends the receives for which no message comes, once no rank needs the connections."""
        if self._left and len(self._silent) == len(self._peers):
            self._disconnect()

    def _disconnect(self) -> None:
        # gloo breaks all connections of a group where one wait ends too late.
        for peer in self._peers:
            with suppress(RuntimeError):
                nothing = self._own.recv([torch.empty(1)], peer, _NEVER_SENT)
                nothing.wait(timedelta(milliseconds=1))

    @staticmethod
    def _start(target: Callable[[], None], of: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"torchrec_bls c10d {of}", daemon=True)
        thread.start()
        _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]
        return thread

    def _listen(self, peer: int) -> None:
        self._take_notes(peer)
        self._silent.add(peer)
        self._disconnect_if_done()

    def _take_notes(self, peer: int) -> None:
        note = torch.empty(_NOTE.size, dtype=torch.uint8)
        while True:
            try:
                self._own.recv([note], peer, _NOTES).wait(FOREVER)
                about, number, text = parse_note(
                    note.numpy().tobytes(), self._shape.world_size, self._started
                )
            except (RuntimeError, ValueError) as error:
                self._lose(peer, str(error))
                return
            if about == _POSTED:
                self._inbox.posted(peer, number)
            elif about == _ASKED:
                self._tell(peer, _POSTED, self._started)
            elif about == _ASKED_END:
                self._tell(peer, _ENDED, self._inbox.told_end)
            elif about == _ENDED:
                self._inbox.ended(peer, number)
            elif about == _READ:
                self._inbox.read(peer, number)
            elif about == _POISON:
                self._inbox.poison(number, text)
                self._tell(peer, _POISON_KNOWN)
            elif about == _POISON_KNOWN:
                self._knowing_poison.add(peer)
            elif about == _CLOSED:
                self._inbox.closed(peer, number)
            else:
                return

    def _lose(self, peer: int, fault: str) -> None:
        self._rounds.settle(peer, _SETTLING)
        if "closed by peer" in fault or "reset by peer" in fault:
            self._inbox.died(peer)
        else:
            self._inbox.lost(peer, fault)

    def _tell(self, peer: int, about: int, number: int = 0, text: bytes = b"") -> None:
        text = text[:_TEXT_BYTES]
        note = bytearray(_NOTE.pack(about, number, len(text), text))
        tensor = torch.frombuffer(note, dtype=torch.uint8)
        with suppress(RuntimeError):  # the peer's listener reports that it is gone
            self._notes.put((self._own.send([tensor], peer, _NOTES), tensor))

    def _keep_notes(self) -> None:
        """Holds the memory of notes until they have left. gloo tells that only to a thread that
        waits."""
        while (note := self._notes.get()) is not None:
            with suppress(RuntimeError):
                note[0].wait(FOREVER)


def parse_note(note: bytes, world_size: int, posted: int) -> tuple[int, int, bytes]:
    """Returns the subject of a note, its number and its text.

    Args:
        note: bytes that a peer sent.
        world_size: number of ranks.
        posted: number of messages that this rank has posted to each peer.

    Raises:
        ValueError: no peer of the same version sends such a note.
    """
    about, number, size, text = _NOTE.unpack(note)
    most = {_READ: posted, _POISON: world_size - 1}.get(about, number)
    if about not in _ABOUT or not 0 <= number <= most or not 0 <= size <= _TEXT_BYTES:
        raise ValueError(
            f"it sent a note that cannot be right (kind {about}, number {number}, text of {size} "
            "bytes). Two versions of torchrec-bls, or a write out of bounds, cause this"
        )
    return about, number, text[:size]


def _own_group(store: Store, shape: Shape) -> Any:
    """Returns a gloo group. torch's annotations lack most of its methods."""
    timeout = min(timedelta(seconds=shape.deadline), FOREVER)
    try:
        return within(
            shape.deadline + _SETTLING,
            lambda: dist.ProcessGroupGloo(store, shape.rank, shape.world_size, timeout=timeout),
        )
    except (RuntimeError, TooLateError) as error:
        raise RendezvousError(
            f"gloo could not connect the ranks: {error}. GLOO_SOCKET_IFNAME names the network "
            "interface that it should use"
        ) from error


def _memory(
    kept: dict[tuple[int, int], torch.Tensor], key: tuple[int, int], size: int
) -> torch.Tensor:
    """Returns `size` bytes: the kept memory if it is large enough, else new memory.

    Raises:
        TransportError: there is no memory.
    """
    if key not in kept or kept[key].numel() < size:
        try:
            kept[key] = torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:  # TypeError: no tensor can be so large
            raise TransportError(
                f"no memory for a message of {size} bytes: {error}. Post smaller messages, or "
                "raise the limit of memory (ulimit -v, --memory of a container)"
            ) from error
    return kept[key][:size]
