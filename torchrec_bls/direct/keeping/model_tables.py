"""The tables of a model that one process has, without a process group."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from torchrec_bls import _native
from torchrec_bls.direct.new_weights import named_source, prefix_of, trained_at
from torchrec_bls.direct.offers.collections import Collection
from torchrec_bls.direct.offers.manifest import OfferedModule
from torchrec_bls.direct.offers.read_tables import Received
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.part_index import Address
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.versions import Versions
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.errors import BLSError
from torchrec_bls.lifetime import whole_at_forks

#: The one owner of all tables.
OWNER = 0


class ServedVersion(NamedTuple):
    """A version that an owner has served.

    Attributes:
        serial: serial number of the version.
        version: its name.
        indexes: process, descriptor, device, inode and bytes of each module's index.
    """

    serial: int
    version: str
    indexes: Sequence[Address]


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model's modules, with their control pages.

    Attributes:
        modules: descriptions of the modules.
        tables: tables of each module.
        served: versions that the owner before this process has served last, the newest first.
    """

    modules: Sequence[OfferedModule]
    tables: list[SharedTables]
    served: Sequence[ServedVersion] = ()

    @classmethod
    def new(cls, collections: Mapping[str, Collection], config: BLSConfig) -> "ModelTables":
        """Makes control pages on which no version serves.

        Args:
            collections: embedding modules of the model, by name.
            config: configuration of their lookups.

        Raises:
            ValueError: a module can't be read directly.
            RendezvousError: there is no memory or no descriptor left.
        """
        modules = [each.alone(name, config) for name, each in collections.items()]
        pages = [_native.ControlPage.create(1, bytes.fromhex(each.digest)) for each in modules]
        return cls(
            modules,
            [
                collections[module.name].tables(module, page)
                for module, page in zip(modules, pages, strict=True)
            ],
        )

    @whole_at_forks()
    def newest_held(self, where: str) -> Received | None:
        """Returns the newest version that a process holds, which serves then; None if there is
        none. This process owns the tables.

        It is the one that serves, or one that the owner before has served: that one may have died
        with a version that no reader had mapped yet, or while the tables were drained.

        Args:
            where: name of the tables, for messages.
        """
        pages = [tables.page for tables in self.tables]
        pages[0].settle()
        versions = list(self.served)
        if pages[0].serial > 0:
            serial, version = pages[0].serving
            recorded = [page.recorded(OWNER, serial) for page in pages]
            indexes = [each[1] for each in recorded if each is not None]
            if len(indexes) == len(pages):
                versions.insert(0, ServedVersion(serial, version, indexes))
        for each in versions:
            serial, version = each.serial, each.version
            try:
                parts = [
                    tables.part_at(OWNER, version, index)
                    for tables, index in zip(self.tables, each.indexes, strict=True)
                ]
                dense = parts[0].dense_weights()
            except BLSError:  # nobody holds it
                continue
            side = parts[0].side
            if side is not None and pages[0].serial_on(side) != serial:
                continue  # rows of a later version lie there
            if dense is not None and not parts[0].drained_for:
                if serial != pages[0].serial:  # what serves is nowhere, so that this one must
                    serial = self._announced(version, parts)
                return self._received(where, version, serial, parts, dense)
        return None

    @whole_at_forks()
    def load(
        self,
        model: nn.Module,
        collections: Mapping[str, Collection],
        weights: Mapping[str, Any],
        version: str,
        where: str,
    ) -> Received:
        """Makes a version and announces it. This process owns the tables.

        Args:
            model: the model, which is not sharded.
            collections: its embedding modules, by name.
            weights: weights by their names in the model's state dict.
            version: name of the version.
            where: name of the tables, for messages.

        Raises:
            ValueError: a weight is missing, or has a wrong shape or dtype.
            RendezvousError: there is no memory for the tables.
        """
        with named_source(weights):
            dense = DenseState(model, [each.module for each in collections.values()]).new(weights)
            contents = [
                tables.content(OWNER, prefix_of(module.name, module.pooled), weights)
                for module, tables in zip(self.modules, self.tables, strict=True)
            ]
            trained = trained_at(weights)
            parts = [
                tables.create(OWNER, version, content, None if module else dense, {}, trained)
                for module, (tables, content) in enumerate(zip(self.tables, contents, strict=True))
            ]
        serial = self._announced(version, parts)
        return self._received(where, version, serial, parts, dense)

    def _announced(self, version: str, parts: Sequence[OwnerPart]) -> int:
        """Makes a version serve; returns its serial number."""
        versions = Versions(self.tables)
        # Nobody holds what is pending: its owner is gone.
        serial, _ = versions.clear_way(OWNER, version, time.monotonic(), lambda: False)
        versions.announce(OWNER, serial, version, parts)
        return serial

    def _received(
        self,
        where: str,
        version: str,
        serial: int,
        parts: Sequence[OwnerPart],
        dense: Mapping[str, Any],
    ) -> Received:
        generations = [
            tables.generation(version, serial, [part])
            for tables, part in zip(self.tables, parts, strict=True)
        ]
        return Received(where, self.modules, self.tables, generations, dense)
