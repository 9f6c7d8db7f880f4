"""The slots that a rank writes at a peer, found from outside of the channel.

Every rank maps the segments of all others. The records of the rendezvous tell their inodes,
/proc/self/maps where they lie: nothing in the product needs to give them away.
"""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults.row import Scene
from torchrec_bls.collective.transport.meeting import Meeting

# Offset and type of each field of MessageHeader (csrc/channel/protocol.h), and of what follows it
# in a message: the lengths of its parts and, if it is one part, its address (pulled) or the frame
# of encoded rows.
FIELDS: dict[str, tuple[int, type[Any]]] = {
    "arrival": (0, ctypes.c_uint64),
    "magic": (8, ctypes.c_uint16),
    "version": (10, ctypes.c_uint8),
    "flags": (11, ctypes.c_uint8),
    "source": (12, ctypes.c_uint16),
    "parts": (14, ctypes.c_uint16),
    "credit": (16, ctypes.c_uint32),
    "label": (20, ctypes.c_uint32),
    "length": (24, ctypes.c_uint64),
    "third length": (40, ctypes.c_uint64),
    "address pid": (32, ctypes.c_int32),
    "address fd": (36, ctypes.c_int32),
    "address device": (40, ctypes.c_uint64),
    "address inode": (48, ctypes.c_uint64),
    "address bytes": (56, ctypes.c_uint64),
    "frame rows": (64 + 8, ctypes.c_uint64),
}

# The records of all ranks about their memory, by the first part of their keys.
_records: dict[str, list[bytes]] = {}


@contextmanager
def kept_records() -> Iterator[None]:
    """Keeps what ranks tell each other about their memory meanwhile."""
    texts = Meeting.texts

    def keep(meeting: Meeting) -> list[bytes]:
        phase, told = meeting._phase, texts(meeting)
        if phase == "memory":
            _records[meeting._base] = told
        return told

    with mock.patch.object(Meeting, "texts", keep):
        yield


class Slot:
    """The slot at `victim` that this rank's message `sequence` stands in."""

    def __init__(self, scene: Scene, victim: int, sequence: int) -> None:
        channel = scene.channel
        assert channel is not None
        record = _records[f"torchrec_bls/{channel.name}"][victim]
        *_, inode, segment_bytes = json.loads(record)["address"]
        stats = channel.stats()
        slots = 2 * (channel.bound + 1)
        self.bytes = stats.slot_bytes
        self.address = (
            _mapped_at(inode)
            + (segment_bytes - stats.ring_bytes)
            + (scene.rank * slots + sequence % slots) * stats.slot_bytes
        )

    def __setitem__(self, field: str, value: int) -> None:
        offset, kind = FIELDS[field]
        kind.from_address(self.address + offset).value = value

    def __getitem__(self, field: str) -> int:
        offset, kind = FIELDS[field]
        value: int = kind.from_address(self.address + offset).value
        return value

    def copy_from(self, other: "Slot") -> None:
        ctypes.memmove(self.address, other.address, self.bytes)


def _mapped_at(inode: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, mapped, *_ = line.split()
        if int(mapped) == inode:
            return int(addresses.partition("-")[0], 16)
    raise LookupError(f"no memory of inode {inode} is mapped")
