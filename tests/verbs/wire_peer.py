"""A rank of a channel over RDMA, written with pyverbs from docs/wire-format.md alone.

It shares no code with the package. It does one request at a time and awaits its completion.
"""

import random
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import htonl, ntohl
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

MAGIC, VERSION, ELSEWHERE = 0xB15A, 3, 1
HEADER = struct.Struct("<QHBBHHII")
ADDRESS = struct.Struct("<QQQQ")
U64 = struct.Struct("<Q")
POISON_WORD, BLOCKS, BLOCK_BYTES = 0, 64, 1088
CREDIT, CLOSED, POISON = 0, 8, 64
POISON_TEXT_BYTES = 1020
PORT = 1
SILENCE = 1.0
_RECEIVE = 1 << 32  # as wr_id, plus the rank


class WireError(Exception):
    """What another rank wrote, or did not, is not as the document says."""


class Poisoned(Exception):
    """A rank has spread a failure."""

    def __init__(self, origin: int, text: str) -> None:
        super().__init__(f"rank {origin} failed: {text}")


class Region:
    """Where the parts of an inbox are."""

    def __init__(self, places: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes + 128 if slot_bytes % 4096 == 0 else slot_bytes
        self.ring = round_up(BLOCKS + BLOCK_BYTES * places, 4096)
        self.bytes = self.ring + places * slots * self.slot_bytes

    def block(self, place: int) -> int:
        return BLOCKS + BLOCK_BYTES * place

    def slot(self, place: int, sequence: int) -> int:
        return self.ring + (place * self.slots + sequence % self.slots) * self.slot_bytes


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def layout(lengths: Sequence[int], at: int) -> tuple[list[int], int]:
    """Returns where each part stands, and the end of the last."""
    starts = []
    for length in lengths:
        at = round_up(at, 64 if length >= 64 else 16)
        starts.append(at)
        at += length
    return starts, at


def lay_out(parts: Sequence[bytes], begin: bytes) -> bytes:
    """Returns `begin` and the parts behind it."""
    starts, end = layout([len(part) for part in parts], len(begin))
    message = bytearray(end)
    message[: len(begin)] = begin
    for start, part in zip(starts, parts, strict=True):
        message[start : start + len(part)] = part
    return bytes(message)


class WirePeer:
    """One rank."""

    def __init__(
        self,
        device: str,
        gid_index: int | None,
        rank: int,
        world_size: int,
        bound: int,
        slot_bytes: int,
        deadline: float,
    ) -> None:
        self.rank, self.bound, self.deadline = rank, bound, deadline
        self.peers = [peer for peer in range(world_size) if peer != rank]
        self.slots = 2 * (bound + 1)
        self._slot_bytes = round_up(slot_bytes, 64)
        self.region = Region(world_size, self.slots, self._slot_bytes)
        self.sent = self.released = 0
        self._sent_to = dict.fromkeys(self.peers, 0)
        self._ending = False
        self.received = dict.fromkeys(self.peers, 0)
        self.known_credit = dict.fromkeys(self.peers, 0)
        self.got_large = False
        self._completed: set[int] = set()
        self._requests = 0
        # Of large messages: sequence and memory, until it is released.
        self._exposed: dict[int, list[tuple[int, MR]]] = {peer: [] for peer in self.peers}
        self._others: list[dict[str, Any]] = []
        self._regions: dict[int, Region] = {}

        self._context = Context(name=device)
        self._port = self._context.query_port(PORT)
        self._gid_index = gid_index
        self._domain = PD(self._context)
        self._queue = CQ(self._context, 64 + 4 * self.slots * world_size)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self._inbox = MR(self._domain, self.region.bytes, access)
        self._outbox = MR(self._domain, self.region.slot_bytes, e.IBV_ACCESS_LOCAL_WRITE)
        self._packet_number = random.getrandbits(24)
        self._pairs = {peer: self._new_pair() for peer in self.peers}
        self._peer_of = {pair.qp_num: peer for peer, pair in self._pairs.items()}
        for peer in self.peers:
            for _ in range(self.slots):
                self._post_receive(peer)

    # Connecting

    def record(self) -> dict[str, Any]:
        """Returns what this rank tells the others before they connect."""
        on_roce = self._gid_index is not None
        gid = self._context.query_gid(PORT, self._gid_index).gid if on_roce else ""
        numbers = {peer: pair.qp_num for peer, pair in self._pairs.items()}
        ranks = sorted([*self.peers, self.rank])
        return {
            "link": "RoCE" if on_roce else "InfiniBand",
            "gid": gid.replace(":", "").rjust(32, "0"),
            "lid": 0 if on_roce else self._port.lid,
            "mtu": 128 << self._port.active_mtu,
            "packet_number": self._packet_number,
            "memory": self._inbox.buf,
            "memory_bytes": self.region.bytes,
            "remote_key": self._inbox.rkey,
            "queue_pairs": [numbers.get(rank, 0) for rank in ranks],
            "places": ranks,
        }

    def connect(self, records: Sequence[dict[str, Any]]) -> None:
        """Connects this rank with all others, by what each has told."""
        self._others = list(records)
        for peer in self.peers:
            other = records[peer]
            places = 1 + sum(pair != 0 for pair in other["queue_pairs"])
            self._regions[peer] = Region(places, self.slots, self._slot_bytes)
            if other["memory_bytes"] != self._regions[peer].bytes:
                raise WireError(f"rank {peer} has {other['memory_bytes']} bytes of inbox")
            attributes = self._attributes()
            attributes.path_mtu = min(self._port.active_mtu, (other["mtu"] // 128).bit_length() - 1)
            attributes.dest_qp_num = other["queue_pairs"][self.rank]
            attributes.rq_psn = other["packet_number"]
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
            attributes.min_rnr_timer = 12
            attributes.ah_attr = self._route_to(other)
            self._pairs[peer].to_rtr(attributes)
            attributes.sq_psn = self._packet_number
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 6
            self._pairs[peer].to_rts(attributes)

    def _route_to(self, other: dict[str, Any]) -> AHAttr:
        if self._gid_index is None:
            return AHAttr(port_num=PORT, dlid=other["lid"])
        digits = other["gid"]
        gid = GID(":".join(digits[i : i + 4] for i in range(0, 32, 4)))
        route = GlobalRoute(dgid=gid, sgid_index=self._gid_index, hop_limit=64)
        return AHAttr(port_num=PORT, is_global=1, gr=route)

    def _new_pair(self) -> QP:
        cap = QPCap(max_send_wr=4, max_recv_wr=self.slots, max_send_sge=1, max_recv_sge=1)
        pair = QP(
            self._domain,
            QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=cap),
        )
        pair.to_init(self._attributes())
        return pair

    def _attributes(self) -> QPAttr:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        return attributes

    def _post_receive(self, peer: int) -> None:
        # pyverbs wants memory; no request that arrives here uses it.
        unused = SGE(self._outbox.buf, 0, self._outbox.lkey)
        self._pairs[peer].post_recv(RecvWR(wr_id=_RECEIVE + peer, num_sge=1, sg=[unused]))

    # Sending

    def send(self, messages: dict[int, Sequence[bytes]], **damage: int) -> None:
        """Sends the next message to each peer; `damage` replaces fields of it, or `immediate`."""
        sequence = self.sent
        enough = sequence + 1 - self.slots
        for peer in self.peers:
            self._await(
                peer, lambda peer=peer: self._credit(peer) >= enough, f"credit of rank {peer}"
            )
            message = self._message(sequence, peer, messages[peer], damage)
            self._outbox.write(message, len(message))
            self._sent_to[peer] += 1
            place = self._others[peer]["places"][self.rank]
            self._write(
                peer,
                self._outbox.buf + 8,
                len(message) - 8,
                self._regions[peer].slot(place, sequence) + 8,
                immediate=damage.get("immediate", sequence & 0xFFFFFFFF),
            )
        self.sent += 1

    def _message(
        self, sequence: int, peer: int, parts: Sequence[bytes], damage: dict[str, int]
    ) -> bytes:
        lengths = b"".join(U64.pack(len(part)) for part in parts)
        at = HEADER.size + len(lengths)
        large = layout([len(part) for part in parts], at)[1] > self.region.slot_bytes
        header = HEADER.pack(
            0,
            MAGIC,
            damage.get("version", VERSION),
            ELSEWHERE if large else 0,
            self.rank,
            damage.get("parts", len(parts)),
            self.released & 0xFFFFFFFF,
            0,
        )
        if not large:
            return lay_out(parts, header + lengths)
        content = lay_out(parts, b"")
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        memory = MR(self._domain, len(content), access)
        memory.write(content, len(content))
        self._exposed[peer].append((sequence, memory))
        return header + lengths + ADDRESS.pack(memory.buf, memory.rkey, 0, len(content))

    def _credit(self, peer: int) -> int:
        """Returns how many messages the peer has released, as far as is known."""
        place = self._own_place(peer)
        (word,) = U64.unpack(self._inbox.read(8, self.region.block(place) + CREDIT))
        self._learn(peer, word)
        return self.known_credit[peer]

    def _learn(self, peer: int, credit: int) -> None:
        if credit > self._sent_to[peer]:
            raise WireError(f"rank {peer} has released {credit} of {self._sent_to[peer]} messages")
        self.known_credit[peer] = max(self.known_credit[peer], credit)
        self._exposed[peer] = [
            (sequence, memory)
            for sequence, memory in self._exposed[peer]
            if sequence >= self.known_credit[peer]
        ]

    def _own_place(self, peer: int) -> int:
        place: int = self._others[self.rank]["places"][peer]
        return place

    # Receiving

    def receive(self) -> dict[int, list[bytes]]:
        """Returns the next message of each peer."""
        sequence = self.released
        for peer in self.peers:
            self._await(
                peer,
                lambda peer=peer: self.received[peer] > sequence or self._has_closed(peer),
                f"message {sequence} of rank {peer}",
            )
            if self.received[peer] <= sequence:
                self._poll()  # the closing word may have been seen before the last messages
                self._check_poison()
            if self.received[peer] <= sequence:
                raise WireError(f"rank {peer} closed the channel")
        return {peer: self._parts(peer, sequence) for peer in self.peers}

    def _parts(self, peer: int, sequence: int) -> list[bytes]:
        slot = self.region.slot(self._own_place(peer), sequence)
        message = self._inbox.read(self.region.slot_bytes, slot)
        _, magic, version, flags, source, count, credit, _ = HEADER.unpack_from(message)
        if (magic, version, source) != (MAGIC, VERSION, peer) or flags > 1 or count > 16:
            raise WireError(f"rank {peer} sent a header {message[: HEADER.size].hex()}")
        known = self.known_credit[peer]
        ahead = (credit - known) & 0xFFFFFFFF
        if ahead < 1 << 31:
            self._learn(peer, known + ahead)
        at = HEADER.size + 8 * count
        lengths = [U64.unpack_from(message, HEADER.size + 8 * i)[0] for i in range(count)]
        if flags == ELSEWHERE:
            self.got_large = True
            message = self._pull(peer, ADDRESS.unpack_from(message, at), layout(lengths, 0)[1])
            at = 0
        starts, end = layout(lengths, at)
        if end > len(message):
            raise WireError(f"rank {peer} sent parts of {end} bytes in {len(message)}")
        return [message[s : s + length] for s, length in zip(starts, lengths, strict=True)]

    def _pull(self, peer: int, address: tuple[int, ...], length: int) -> bytes:
        remote, key, _, there = address
        if there < length:
            raise WireError(f"rank {peer} has a large message at {address}")
        memory = MR(self._domain, length, e.IBV_ACCESS_LOCAL_WRITE)
        request = SendWR(
            opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[SGE(memory.buf, length, memory.lkey)]
        )
        request.set_wr_rdma(key, remote)
        self._run(peer, request)
        content: bytes = memory.read(length, 0)
        return content

    def release(self) -> None:
        """Says that the message that was received last is not needed any more."""
        self.released += 1
        if self.got_large:
            for peer in self.peers:
                if not self._has_closed(peer):
                    self._write_word(peer, CREDIT, self.released)

    # The end

    def close(self) -> None:
        """Says that nothing more comes, and keeps large messages until they were read."""
        for peer in self.peers:
            if not self._has_closed(peer):
                self._write_word(peer, CLOSED, 1)
        for peer in self.peers:
            self._until(
                lambda peer=peer: self._has_closed(peer) or self._has_read_large(peer),
                f"the end of rank {peer}",
            )

    def _has_read_large(self, peer: int) -> bool:
        self._credit(peer)
        return not self._exposed[peer]

    def spread_poison(self, text: str, origin: int | None = None) -> None:
        """Tells all peers of a failure, except those that do not answer."""
        content = struct.pack("<I", (self.rank if origin is None else origin) + 1)
        content += text.encode()[: POISON_TEXT_BYTES - 1] + b"\0"
        for peer in self.peers:
            place = self._others[peer]["places"][self.rank]
            with suppress(WireError):
                self._outbox.write(content, len(content))
                at = self.region.block(place) + POISON
                self._write(peer, self._outbox.buf, len(content), at)
                self._outbox.write(U64.pack(self.rank + 1), 8)
                self._write(peer, self._outbox.buf, 8, POISON_WORD)

    def _has_closed(self, peer: int) -> bool:
        at = self.region.block(self._own_place(peer)) + CLOSED
        return bool(U64.unpack(self._inbox.read(8, at))[0])

    def _check_poison(self) -> None:
        (word,) = U64.unpack(self._inbox.read(8, POISON_WORD))
        if not word or self._ending:
            return
        self._ending = True
        at = self.region.block(self._own_place(word - 1)) + POISON
        content = self._inbox.read(4 + POISON_TEXT_BYTES, at)
        origin = struct.unpack_from("<I", content)[0] - 1
        text = content[4:].partition(b"\0")[0].decode(errors="replace")
        self.spread_poison(text, origin)
        for peer in self.peers:
            with suppress(WireError):
                self._write_word(peer, CLOSED, 1)
        raise Poisoned(origin, text)

    # Requests and completions

    def _write_word(self, peer: int, field: int, value: int) -> None:
        place = self._others[peer]["places"][self.rank]
        self._outbox.write(U64.pack(value), 8)
        self._write(peer, self._outbox.buf, 8, self.region.block(place) + field)

    def _write(
        self, peer: int, address: int, length: int, offset: int, immediate: int | None = None
    ) -> None:
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            imm_data=htonl(immediate or 0),
            sg=[SGE(address, length, self._outbox.lkey)],
        )
        request.set_wr_rdma(self._others[peer]["remote_key"], self._others[peer]["memory"] + offset)
        self._run(peer, request)

    def _run(self, peer: int, request: SendWR) -> None:
        self._requests += 1
        request.wr_id = number = self._requests
        self._pairs[peer].post_send(request)
        try:
            self._until(lambda: number in self._completed, f"a request to rank {peer}")
        except WireError:
            self._check_poison()
            if not self._has_closed(peer):
                raise
        self._completed.discard(number)

    def _await(self, peer: int, condition: Callable[[], bool], what: str) -> None:
        """Waits for what a peer does, which may fail instead."""
        silent_since = time.monotonic()

        def done() -> bool:
            nonlocal silent_since
            if condition():
                return True
            self._check_poison()
            if time.monotonic() - silent_since > SILENCE:
                self._write_word(peer, CREDIT, self.released)  # fails if the peer is dead
                silent_since = time.monotonic()
            return False

        self._until(done, what)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.deadline
        while not condition():
            if time.monotonic() > end:
                raise WireError(f"{what} did not come within {self.deadline} s")
            self._poll()

    def _poll(self) -> None:
        for completion in self._queue.poll(16)[1]:
            if completion.status != e.IBV_WC_SUCCESS:
                raise WireError(f"request {completion.wr_id:#x}: status {completion.status}")
            if completion.wr_id < _RECEIVE:
                self._completed.add(completion.wr_id)
                continue
            peer = self._peer_of[completion.qp_num]
            expected = self.received[peer] & 0xFFFFFFFF
            if completion.opcode != e.IBV_WC_RECV_RDMA_WITH_IMM:
                raise WireError(f"rank {peer} sent something else: {completion.opcode}")
            if ntohl(completion.imm_data) != expected:
                raise WireError(f"rank {peer} sent {ntohl(completion.imm_data)}, not {expected}")
            self.received[peer] += 1
            self._post_receive(peer)
