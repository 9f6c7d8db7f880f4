"""The tables of one version of the weights, in the parts of all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchrec_bls import _native
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.registration import RegistrationError
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.part_index import Side
from torchrec_bls.direct.side_windows import populated_window

#: Some columns of a table: their place in a row of the table, bytes of a row, rows of a block, and
#: of each block its owner, its place in the window, and its rows. Places are in bytes.
PlacedColumns: TypeAlias = tuple[int, int, int, list[tuple[int, int, int]]]
#: A feature: its key, its place in a row of the output in bytes, whether bags are pooled to means,
#: and the columns of its table.
PlacedFeature: TypeAlias = tuple[int, int, bool, list[PlacedColumns]]


@dataclass(frozen=True)
class FeatureLookup:
    """A feature and the table that it is looked up in.

    Attributes:
        key: place of the feature in the batches.
        table: name of the table.
        first_column: first column of the feature in the output, where it is pooled.
        means: whether bags are pooled to means, not sums.
    """

    key: int
    table: str
    first_column: int = 0
    means: bool = False


class Generation:
    """The tables of one version of the weights. A lookup in it sees no other version.

    Args:
        version: name of the version.
        serial: serial number of the version among those that have served, counted from 1.
        parts: parts of all owners.
        pages: pages of the parts, in the order of `window`.
        window: window of these pages, if they are mapped already.

    Attributes:
        version: see above.
        serial: see above.
        parts: see above. They stay mapped while the generation is used.
        pages: see above.
        side: side of the version, whose rows its owner may write over as soon as a later one
            serves: a lookup has to pin it. None: they stay as they are.
        drained_for: version for whose making the tables are drained: this one has no pages, and no
            lookup can read it. Empty: it has all.
        window: memory of all tables, mapped privately, with all its pages. What this process writes
            to it, no other one sees. Pieces that are refreshed can't be written to.
        registered: the tables as a GPU reads them; None: the CPU does.

    Raises:
        BLSError: the pages can't be mapped.
    """

    def __init__(
        self,
        version: str,
        serial: int,
        parts: Sequence[OwnerPart],
        pages: Iterable[tuple[_native.TableSegment, int, int]],
        window: _native.TableWindow | None = None,
    ) -> None:
        self.version = version
        self.serial = serial
        self.parts = list(parts)
        self.pages = list(pages)
        self.side = side_of(parts)
        self.drained_for = next((each.drained_for for each in parts if each.drained_for), "")
        self.window = populated_window(self.pages) if window is None else window
        self.registered: RegisteredTables | None = None

    def register_with(self, gpu: Gpu) -> None:
        """Makes this GPU read the tables.

        Raises:
            RegistrationError: it can't.
            BLSError: they can't be mapped once more.
        """
        if self.side is not None:  # their rows change, and nothing pins them for the GPU
            raise RegistrationError(
                f"version {self.version!r} has tables that are refreshed by row, which GPUs do not "
                "read yet: publish whole versions, or look up on the CPU"
            )
        self.registered = RegisteredTables(gpu, self.pages)

    @property
    def mappings(self) -> Sequence[object]:
        """Returns what is mapped for this version alone, and unmapped when nothing refers to it.
        Pieces may belong to other versions as well; a part has its index as long as them. A version
        without rows has nothing that an owner waits for: an error that tells of it, and that
        somebody keeps, may keep it."""
        if self.drained_for:
            return []
        registered = [] if self.registered is None else [self.registered.window]
        return [self.window, *registered, *(part.index for part in self.parts)]


def side_of(parts: Iterable[OwnerPart]) -> Side | None:
    """Returns the side of a version that consists of some parts, see Generation."""
    return next((each.side for each in parts if each.side is not None), None)


class FloatGeneration(Generation):
    """Float tables of one version, with the bytes of one owner behind those of the other.

    Args:
        version: see Generation.
        serial: see Generation.
        parts: see Generation.
        pages: see Generation.
        window: see Generation.
        places: places of the shards in the window, in bytes.
        tables: layouts of the tables by name.
        item_bytes: bytes of a weight.
    """

    def __init__(
        self,
        version: str,
        serial: int,
        parts: Sequence[OwnerPart],
        pages: Iterable[tuple[_native.TableSegment, int, int]],
        window: _native.TableWindow | None,
        places: Mapping[tuple[str, Shard], int],
        tables: Mapping[str, TableLayout],
        item_bytes: int,
    ) -> None:
        super().__init__(version, serial, parts, pages, window)
        self._places = places
        self._tables = tables
        self._item_bytes = item_bytes

    def features(self, lookups: Sequence[FeatureLookup]) -> _native.ShardedFeatures:
        """Returns the features for native code, in the order of `lookups`. They keep the
        window."""
        return _native.ShardedFeatures(self.placed(lookups), self.window)

    def placed(self, lookups: Sequence[FeatureLookup]) -> list[PlacedFeature]:
        """Returns the features with their places in the window, in the order of `lookups`."""
        return [
            (
                lookup.key,
                lookup.first_column * self._item_bytes,
                lookup.means,
                [self._columns(lookup.table, blocks) for blocks in self._pieces(lookup.table)],
            )
            for lookup in lookups
        ]

    def _pieces(self, table: str) -> list[list[Shard]]:
        return self._tables[table].column_pieces()

    def _columns(self, table: str, blocks: list[Shard]) -> PlacedColumns:
        # Ranks without rows come last: their partial sums would be zeros, and adding zeros can
        # change bits.
        return (
            blocks[0].first_column * self._item_bytes,
            blocks[0].columns * self._item_bytes,
            max(1, blocks[0].rows),
            [(block.owner, self._places[table, block], block.rows) for block in blocks],
        )
