"""The index of an owner's part of a version, which lists the pieces."""

import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch

from torchrec_bls import _native
from torchrec_bls.direct.dense_weights import Parts, dense_parts
from torchrec_bls.direct.pieces import Piece
from torchrec_bls.errors import ProtocolError
from torchrec_bls.records import Amount, Record, Whole, decode

#: Process, descriptor, device, inode and bytes of a memory file.
Address = tuple[Whole, Whole, Whole, Whole, Whole]

_MAGIC = b"tbblix02"
# A magic number, and the bytes of the record that follows.
_HEAD = struct.Struct("<8sQ")
#: What to do about an index or a piece that is something else.
CURE = "install one version of torchrec-bls everywhere"
# Bytes of SHA-256.
_DIGEST_BYTES = 32


class Label(NamedTuple):
    """The label of an owner's part.

    Attributes:
        owner: rank that owns it.
        version: name of the version.
        layout: digest of the layouts.
    """

    owner: int
    version: str
    layout: bytes

    def of_piece(self, piece: Piece, version: str) -> "Label":
        """Returns the label of a piece that a version has made."""
        return Label(self.owner, version, piece.digest(self.layout))


#: One of the two copies of tables that are refreshed by row.
Side = Literal[0, 1]


def other_side(side: Side | None) -> Side:
    """Returns the side of the version that follows one on a side, or on none."""
    return 0 if side == 1 else 1


class PieceRecord(Record):
    """A piece, as an index lists it.

    Attributes:
        address: its address.
        version: version that made it.
        digests: digests of its steps, in hexadecimal digits, one behind the other.
        other: address of its copy on the other side; None: both sides have this one.
    """

    address: Address
    version: str
    digests: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})*$")]
    other: Address | None = None


class Facts(Record):
    """The facts of a publication, of one owner and module.

    Attributes:
        published: when its tables were made, in seconds since the epoch.
        seconds: how long that took.
        bytes_written: bytes of the pieces that were made for it.
        bytes_reused: bytes of the pieces that an earlier version had made.
        trained: when a training had these weights, in seconds since the epoch. None: unknown.
    """

    published: Amount
    seconds: Amount
    bytes_written: Whole
    bytes_reused: Whole
    trained: Amount | None = None


class IndexRecord(Record):
    """What an index lists.

    Attributes:
        pieces: the pieces by number.
        facts: facts of the publication.
        drained_for: version for whose making the tables are drained: this one has no pieces. Empty:
            it has all.
        side: side of the version, if rows of it are written over later (see
            docs/design/row-refresh.md). None: all its pieces stay as they are.
    """

    pieces: list[PieceRecord]
    facts: Facts
    drained_for: str = ""
    side: Side | None = None


def make_index(
    label: Label, record: IndexRecord, dense: Mapping[str, Any] | None
) -> tuple[_native.TableSegment, int]:
    """Returns an index, and the place after its record."""
    text = msgspec.json.encode(record)
    head = bytearray(_HEAD.pack(_MAGIC, len(text)) + text)
    begin: int = _native.FIRST_TABLE_OFFSET
    end = size = begin + len(head)
    parts: Parts = ()
    if dense is not None:
        parts, size = dense_parts(dense, end)
    parts = chain([(torch.frombuffer(head, dtype=torch.uint8), begin)], parts)
    return _native.TableSegment.create(label, parts, size, False), end


def read_index(index: _native.TableSegment, label: Label) -> tuple[IndexRecord, int]:
    """Returns the record of an index, and the place after it."""
    where = f"the index of the tables of rank {label.owner}"
    begin = _native.FIRST_TABLE_OFFSET + _HEAD.size
    if index.size >= begin:
        # Not by tensors: each reader of each version does this, between two of its forwards.
        pages = memoryview(_native.PrivatePages(index))  # type: ignore[arg-type]
        magic, length = _HEAD.unpack_from(pages, begin - _HEAD.size)
        if magic == _MAGIC and length <= index.size - begin:
            text = bytes(pages[begin : begin + length])
            return decode(text, IndexRecord, where, CURE, ProtocolError), begin + length
    raise ProtocolError(f"what was announced as {where} lists no pieces: {CURE}")


def bytes_of(segment: _native.TableSegment) -> torch.Tensor:
    """Returns a private view of all bytes of a segment."""
    return torch.frombuffer(_native.PrivatePages(segment), dtype=torch.uint8)


def digests_told(digests: Sequence[bytes]) -> str:
    """Returns digests as a PieceRecord has them."""
    return b"".join(digests).hex()


def digests_in(told: str) -> list[bytes]:
    """Returns the digests of a PieceRecord."""
    data = bytes.fromhex(told)
    return [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]
