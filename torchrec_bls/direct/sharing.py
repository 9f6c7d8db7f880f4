"""How the ranks of a host come to have each other's tables."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.gpu.registration import RegistrationError
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.direct.steps import Content
from torchrec_bls.errors import RendezvousError

_FIRST_SERIAL = 1

T = TypeVar("T", bound=SharedTables)


class NotRegisteredError(RendezvousError):
    """The GPU of a rank can't read the tables that the ranks were about to share. All ranks raise
    it alike, and may go on together without direct reads."""


class OwnPart(NamedTuple):
    """What a rank shares.

    Attributes:
        content: content of its bytes.
        told: what the other ranks have to know, by name; the same names on every rank.
        same: what has to be equal on all ranks, by its name for messages, as a pair: the value, and
            what the user has to change if values differ.
    """

    content: Content
    told: Mapping[str, str]
    same: Mapping[str, tuple[str, str]]


def share_parts(
    rendezvous: Rendezvous,
    group: dist.ProcessGroup,
    digest: bytes,
    own: Callable[[], OwnPart],
    tables_of: Callable[[_native.ControlPage, Sequence[Mapping[str, Any]]], T],
) -> tuple[T, Generation]:
    """Makes this rank's part of the first version and maps those of all other ranks, collectively.

    Args:
        rendezvous: rendezvous of the ranks.
        group: ranks of one host.
        digest: digest of the layouts, the same on every rank.
        own: function that returns what this rank shares.
        tables_of: function that returns the tables, by the control page and what the ranks have
            told.

    Returns:
        The tables, and their first generation.

    Raises:
        RendezvousError: a rank has no memory for its tables, or cannot map another rank's, or ranks
            have other values; all ranks raise.
        NotRegisteredError: a rank can't register the tables with its GPU.
    """
    rank = group.rank()
    with rendezvous.own_part():
        content, told, same = own()
        page = _native.ControlPage.create(group.size(), digest) if rank == 0 else None
    at = page.address if page is not None else [0] * 5
    values = {name: value for name, (value, _) in same.items()}
    records = rendezvous.exchange("places", {"page": at, **told, **values})
    cures = {name: cure for name, (_, cure) in same.items()}
    require_equal(rendezvous.name, records, cures, rendezvous.names)
    with rendezvous.own_part():
        if page is None:
            page = _native.ControlPage.open(tuple(records[0]["page"]), group.size(), digest)
        tables = tables_of(page, records)
        part = tables.create(rank, FIRST_VERSION, content, None, {})
    addresses = rendezvous.exchange("tables", {"address": part.index.address})
    with rendezvous.own_part():
        parts = [
            part
            if other == rank
            else tables.part_at(other, FIRST_VERSION, tuple(told_by["address"]))
            for other, told_by in enumerate(addresses)
        ]
        generation, unregistered = None, ""
        try:
            generation = tables.generation(FIRST_VERSION, _FIRST_SERIAL, parts)
        except RegistrationError as error:
            unregistered = str(error)
        page.take_over(rank, 0, this_process().identity)
        page.record(rank, _FIRST_SERIAL, FIRST_VERSION, part.index.address)
        page.announce(rank, _FIRST_SERIAL)
    mapped = rendezvous.exchange("mapped", {"unregistered": unregistered})
    for other, record in enumerate(mapped):
        if record["unregistered"]:
            where = f"{rendezvous.name}: {rendezvous.names.of(other)}"
            raise NotRegisteredError(f"{where}: {record['unregistered']}")
    assert generation is not None
    return tables, generation


def abandon_with(owner: object, page: _native.ControlPage, rank: int) -> None:
    """Tells the readers of a rank's tables that it publishes no more, when `owner` is freed."""
    end = weakref.finalize(owner, _abandon, page, rank, this_process().identity)
    end.atexit = False


def _abandon(page: _native.ControlPage, rank: int, identity: int) -> None:
    if identity == this_process().identity:  # not in a fork, whose parent may go on
        page.abandon(rank)
