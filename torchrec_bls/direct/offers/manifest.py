"""The facts about tables that a process needs if it did not share them itself, as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from msgspec import structs

from torchrec_bls import _native
from torchrec_bls.direct.arguments import check_is_version
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import ProtocolError
from torchrec_bls.records import Positive, Record, Whole, decode


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
        version: version of the descriptors that come with the manifest. For each module these are
            the control page and the segments by owner; the last one is a segment of the dense
            weights.
        serial: serial number of that version, counted from 1.
        modules: the modules.
    """

    host: str
    version: str
    serial: int
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
        data = msgspec.json.encode(content)
        return decode(
            data,
            _ManifestRecord,
            f"{where} hands over a manifest that can't be read",
            "install one version of torchrec-bls in both processes",
            ProtocolError,
        ).manifest()


def offsets_of(tables: SharedTables, layout: TableLayout) -> list[int]:
    """Returns the places of a table's shards, in the order of its layout."""
    return [tables.offsets[layout.name, shard] for shard in layout.shards]


class _ShardRecord(Record):
    owner: Whole
    first_row: Whole
    rows: Whole
    first_column: Whole
    columns: Whole


class _LayoutRecord(Record):
    name: str
    rows: Whole
    columns: Whole
    dtype: str
    shards: list[_ShardRecord]

    def __post_init__(self) -> None:
        self.layout().check_cover()

    def layout(self) -> TableLayout:
        shards = tuple(Shard(**structs.asdict(shard)) for shard in self.shards)
        return TableLayout(self.name, self.rows, self.columns, self.dtype, shards)


class _TableRecord(Record):
    layout: _LayoutRecord
    offsets: list[Whole]
    features: list[str]
    pooling: str

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.layout.shards):
            raise ValueError(f"table '{self.layout.name}' has {len(self.offsets)} offsets")


class _ModuleRecord(Record):
    name: str
    pooled: bool
    weighted: bool
    bad_ids: str
    form: dict[str, Any]
    tables: list[_TableRecord]
    sizes: list[Whole]
    dtype: str
    huge_pages: bool
    digest: str

    def __post_init__(self) -> None:
        if not self.tables or not self.sizes:
            raise ValueError(f"module '{self.name}' has no tables or no owners")
        if not isinstance(getattr(torch, self.dtype.removeprefix("torch."), None), torch.dtype):
            raise ValueError(
                f"module '{self.name}' has weights of {self.dtype!r}, which is no dtype"
            )
        layouts = [table.layout.layout() for table in self.tables]
        if digest_of(layouts).hex() != self.digest:
            raise ValueError(f"the layouts of module '{self.name}' have another digest")
        owners = {shard.owner for layout in layouts for shard in layout.shards}
        if not owners <= set(range(len(self.sizes))):
            raise ValueError(f"module '{self.name}' has owners {sorted(owners)}")

    def module(self) -> OfferedModule:
        tables = [
            OfferedTable(table.layout.layout(), table.offsets, table.features, table.pooling)
            for table in self.tables
        ]
        return OfferedModule(**{**structs.asdict(self), "tables": tables})


class _ManifestRecord(Record):
    host: str
    version: str
    serial: Positive
    modules: list[_ModuleRecord]

    def __post_init__(self) -> None:
        names = [module.name for module in self.modules]
        check_is_version(self.version)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"its modules are {names}")
        if len({len(module.sizes) for module in self.modules}) > 1:
            raise ValueError("its modules have different numbers of owners")

    def manifest(self) -> Manifest:
        modules = [each.module() for each in self.modules]
        return Manifest(self.host, self.version, self.serial, modules)
