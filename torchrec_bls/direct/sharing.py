"""How the ranks of a host come to have each other's tables."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.dense_weights import Parts
from torchrec_bls.direct.process import this_process
from torchrec_bls.huge_pages import HugePages

#: Serial number of the version that is shared.
FIRST_SERIAL = 1

T = TypeVar("T")

# Makes something of the control page, the segments by rank and what the ranks have told.
Use = Callable[[_native.ControlPage, list[_native.TableSegment], Sequence[Mapping[str, Any]]], T]


class OwnSegment(NamedTuple):
    """What a rank shares.

    Attributes:
        parts: contiguous tensors, and their places in the segment, in bytes.
        bytes: bytes of the segment.
        told: what the other ranks have to know, by name; the same names on every rank.
    """

    parts: Parts
    bytes: int
    told: Mapping[str, str]


def share_segments(
    rendezvous: Rendezvous,
    group: dist.ProcessGroup,
    digest: bytes,
    own: Callable[[], OwnSegment],
    huge_pages: HugePages,
    use: Use[T],
) -> T:
    """Makes this rank's segment and maps those of all other ranks, collectively.

    Args:
        rendezvous: rendezvous of the ranks.
        group: ranks of one host.
        digest: digest of the layouts, the same on every rank.
        own: function that returns what this rank shares.
        huge_pages: what the segments ask for, see huge_pages_for.
        use: function that makes something of the control page, the segments by rank and what the
            ranks have told. All ranks have called it before one returns.

    Returns:
        What `use` returns.

    Raises:
        RendezvousError: a rank has no memory for its tables, or cannot map another rank's; all
            ranks raise.
    """
    rank = group.rank()
    with rendezvous.own_part():
        parts, size, told = own()
        label = (rank, FIRST_VERSION, digest)
        segment = _native.TableSegment.create(label, parts, size, huge_pages)
        page = _native.ControlPage.create(group.size(), digest) if rank == 0 else None
    record = {
        "address": segment.address,
        "page": page.address if page is not None else [0] * 5,
        **told,
    }
    records = rendezvous.exchange("tables", record)
    with rendezvous.own_part():
        if page is None:
            page = _native.ControlPage.open(tuple(records[0]["page"]), group.size(), digest)
        segments = [
            segment
            if other == rank
            else _native.TableSegment.open(
                tuple(told_by["address"]), (other, FIRST_VERSION, digest)
            )
            for other, told_by in enumerate(records)
        ]
        used = use(page, segments, records)
        page.take_over(rank, 0, this_process().identity)
        page.record(rank, FIRST_SERIAL, FIRST_VERSION, segment.address)
        page.announce(rank, FIRST_SERIAL)
    rendezvous.exchange("mapped", {})
    return used


def abandon_with(owner: object, page: _native.ControlPage, rank: int) -> None:
    """Tells the readers of a rank's tables that it publishes no more, when `owner` is freed."""
    end = weakref.finalize(owner, _abandon, page, rank, this_process().identity)
    end.atexit = False


def _abandon(page: _native.ControlPage, rank: int, identity: int) -> None:
    if identity == this_process().identity:  # not in a fork, whose parent may go on
        page.abandon(rank)
