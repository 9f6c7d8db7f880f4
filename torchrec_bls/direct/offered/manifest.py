"""The facts about tables that a process needs if it did not share them itself, as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import ProtocolError


@dataclass(frozen=True)
class OfferedTable:
    """A table, its shards, and the way it is looked up.

    Attributes:
        layout: layout of the table.
        offsets: places of its shards in the segments of their owners, in bytes, in the layout's
            order.
        features: features that are looked up in it.
        pooling: pooling of bags; empty where rows are not pooled.
    """

    layout: TableLayout
    offsets: list[int]
    features: list[str]
    pooling: str


@dataclass(frozen=True)
class OfferedModule:
    """A module and its tables.

    Attributes:
        name: name in the model.
        pooled: whether it is an EmbeddingBagCollection, not an EmbeddingCollection.
        weighted: whether its ids have weights.
        bad_ids: see BLSConfig.
        form: form of its output.
        tables: tables in the order of the module.
        sizes: bytes of the tables in the segments, by owner.
        dtype: dtype of the weights, as torch prints it.
        huge_pages: whether new segments ask for pages of 2 MiB.
        digest: digest of the layouts, in hexadecimal digits.
    """

    name: str
    pooled: bool
    weighted: bool
    bad_ids: str
    form: Mapping[str, Any]
    tables: list[OfferedTable]
    sizes: list[int]
    dtype: str
    huge_pages: bool
    digest: str

    def share(self, page: _native.ControlPage) -> SharedTables:
        """Returns the tables.

        Args:
            page: control page of the module.

        Raises:
            ProtocolError: a table does not lie in its segment.
        """
        shared = SharedTables(
            page,
            bytes.fromhex(self.digest),
            {table.layout.name: table.layout for table in self.tables},
            {
                (table.layout.name, shard): offset
                for table in self.tables
                for shard, offset in zip(table.layout.shards, table.offsets, strict=True)
            },
            self.sizes,
            getattr(torch, self.dtype.removeprefix("torch.")),
            self.huge_pages,
        )
        shared.check_places()
        return shared


@dataclass(frozen=True)
class Manifest:
    """All modules of a model, in an order that all processes share.

    Attributes:
        host: identity of the host, see host_identity.
        generation: generation of the descriptors that come with the manifest. For each module these
            are the control page and the segments by owner; the last one is a segment of the dense
            weights.
        modules: the modules.
    """

    host: str
    generation: int
    modules: list[OfferedModule]

    @property
    def descriptors(self) -> int:
        """Returns the number of descriptors that come with the manifest."""
        return sum(1 + len(module.sizes) for module in self.modules) + 1

    def as_json(self) -> Any:
        """Returns the content for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any, where: str) -> "Manifest":
        """Reads what `as_json` returned.

        Args:
            content: content that came.
            where: place that it came from, for messages.

        Raises:
            ProtocolError: the content is something else.
        """
        try:
            manifest = cls(
                str(content["host"]),
                int(content["generation"]),
                [_module(each) for each in content["modules"]],
            )
            names = [module.name for module in manifest.modules]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"its modules are {names}")
            if len({len(module.sizes) for module in manifest.modules}) > 1:
                raise ValueError("its modules have different numbers of owners")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(
                f"{where} hands over a manifest that can't be read ({error!r}): install one "
                "version of torchrec-bls in both processes"
            ) from error
        return manifest


def offsets_of(tables: SharedTables, layout: TableLayout) -> list[int]:
    """Returns the places of a table's shards, in the order of its layout."""
    return [tables.offsets[layout.name, shard] for shard in layout.shards]


def _module(content: Any) -> OfferedModule:
    tables = [_table(each) for each in content["tables"]]
    module = OfferedModule(**{**content, "tables": tables})
    _check_type(str, module.name, module.bad_ids, module.dtype, module.digest)
    _check_type(dict, module.form)
    _check_type(list, module.sizes)
    _check_type(bool, module.pooled, module.weighted, module.huge_pages)
    _check_numbers(module.sizes)
    if not tables or not module.sizes:
        raise ValueError(f"module '{module.name}' has no tables or no owners")
    if digest_of(_layouts(tables)).hex() != module.digest:
        raise ValueError(f"the layouts of module '{module.name}' have another digest")
    owners = {shard.owner for table in tables for shard in table.layout.shards}
    if not owners <= set(range(len(module.sizes))):
        raise ValueError(f"module '{module.name}' has owners {sorted(owners)}")
    return module


def _layouts(tables: Sequence[OfferedTable]) -> list[TableLayout]:
    return [table.layout for table in tables]


def _table(content: Any) -> OfferedTable:
    shards = tuple(Shard(**shard) for shard in content["layout"]["shards"])
    layout = TableLayout(**{**content["layout"], "shards": shards})
    table = OfferedTable(**{**content, "layout": layout})
    _check_type(list, table.features, table.offsets)
    _check_type(str, layout.name, layout.dtype, table.pooling, *table.features)
    _check_numbers([layout.rows, layout.columns, *table.offsets])
    for shard in shards:
        _check_numbers(astuple(shard))
    if len(table.offsets) != len(shards):
        raise ValueError(f"table '{layout.name}' has {len(table.offsets)} offsets")
    layout.check_cover()
    return table


def _check_type(kind: type, *values: object) -> None:
    wrong = [value for value in values if type(value) is not kind]
    if wrong:
        raise TypeError(f"{wrong} stand where a {kind.__name__} belongs")


def _check_numbers(values: Iterable[object]) -> None:
    wrong = [value for value in values if type(value) is not int or value < 0]
    if wrong:
        raise TypeError(f"{wrong} stand where numbers belong")
