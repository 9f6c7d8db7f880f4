"""The facts about tables that a process needs if it did not share them itself, as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from msgspec import structs

from torchrec_bls.direct.arguments import check_is_version
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.errors import ProtocolError
from torchrec_bls.huge_pages import HugePages
from torchrec_bls.records import Positive, Record, Whole, decode


@dataclass(frozen=True)
class OfferedTable:
    """A table, its shards, and the way it is looked up.

    Attributes:
        layout: layout of the table.
        offsets: places of its shards among the bytes of their owners, in the layout's
            order. Places of quantized rows are computed, and not sent.
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
        quantized: whether rows are stored as FBGEMM's quantized lookups read them.
        pooled: whether it is an EmbeddingBagCollection, not an EmbeddingCollection.
        weighted: whether its ids have weights.
        bad_ids: see BLSConfig.
        form: description of its output.
        tables: tables in the order of the module.
        sizes: number of bytes of each owner's tables.
        pieces: number of pieces of each owner's tables.
        dtype: dtype of the weights, as torch prints it.
        huge_pages: what new segments ask for, see huge_pages_for.
        digest: digest of the layouts or of the places of quantized rows, in hexadecimal digits.
    """

    name: str
    quantized: bool
    pooled: bool
    weighted: bool
    bad_ids: str
    form: Mapping[str, Any]
    tables: list[OfferedTable]
    sizes: list[int]
    pieces: list[int]
    dtype: str
    huge_pages: HugePages
    digest: str


@dataclass(frozen=True)
class Manifest:
    """All modules of a model, in an order that all processes share.

    Attributes:
        host: identity of the host, see host_identity.
        version: version of the descriptors that come with the manifest. For each module these are
            the control page, and of each owner the index and the pieces; the last one is a segment
            of the dense weights.
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
        return sum(1 + len(each.pieces) + sum(each.pieces) for each in self.modules) + 1

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

    def layout(self) -> TableLayout:
        shards = tuple(Shard(**structs.asdict(shard)) for shard in self.shards)
        return TableLayout(self.name, self.rows, self.columns, self.dtype, shards)


class _TableRecord(Record):
    layout: _LayoutRecord
    offsets: list[Whole]
    features: list[str]
    pooling: str


class _ModuleRecord(Record):
    name: str
    quantized: bool
    pooled: bool
    weighted: bool
    bad_ids: str
    form: dict[str, Any]
    tables: list[_TableRecord]
    sizes: list[Whole]
    pieces: list[Whole]
    dtype: str
    huge_pages: HugePages
    digest: str

    def __post_init__(self) -> None:
        if not self.tables or not self.sizes:
            raise ValueError(f"module '{self.name}' has no tables or no owners")
        if len(self.pieces) != len(self.sizes):
            raise ValueError(
                f"module '{self.name}' has the pieces of {len(self.pieces)} owners, not of "
                f"{len(self.sizes)}"
            )
        if not isinstance(getattr(torch, self.dtype.removeprefix("torch."), None), torch.dtype):
            raise ValueError(
                f"module '{self.name}' has weights of {self.dtype!r}, which is no dtype"
            )
        layouts = [table.layout.layout() for table in self.tables]
        if self.quantized:
            self._check_stored(layouts)
        else:
            self._check_float(layouts)
        owners = {shard.owner for layout in layouts for shard in layout.shards}
        if not owners <= set(range(len(self.sizes))):
            raise ValueError(f"module '{self.name}' has owners {sorted(owners)}")

    def _check_float(self, layouts: list[TableLayout]) -> None:
        if digest_of(layouts).hex() != self.digest:
            raise ValueError(f"the layouts of module '{self.name}' have another digest")
        for table, layout in zip(self.tables, layouts, strict=True):
            layout.check_cover()
            if len(table.offsets) != len(layout.shards):
                raise ValueError(f"table '{layout.name}' has {len(table.offsets)} offsets")

    def _check_stored(self, layouts: list[TableLayout]) -> None:
        for layout in layouts:
            if layout != layout.in_whole_rows() or not layout.has_each_row_once():
                raise ValueError(f"the shards of table '{layout.name}' are not its rows")

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
