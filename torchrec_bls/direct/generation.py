"""The tables of one version of the weights, in the segments of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_bls import _native
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.publication_facts import PublicationFacts


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
        segments: segments by rank.

    Attributes:
        version: see above.
        serial: see above.
        segments: see above. They stay mapped while the generation is used.
        facts: facts of its publication, of each part; none for the version that was loaded.
    """

    facts: Sequence[PublicationFacts] = ()

    def __init__(self, version: str, serial: int, segments: Sequence[_native.TableSegment]) -> None:
        self.version = version
        self.serial = serial
        self.segments = list(segments)

    @property
    def mappings(self) -> Sequence[object]:
        """Returns what is mapped for this version, and unmapped when nothing refers to it."""
        return self.segments


class FloatGeneration(Generation):
    """Float tables of one version.

    Args:
        version: see Generation.
        serial: see Generation.
        segments: see Generation.
        offsets: places of the shards in the segments of their owners, in bytes.
        tables: layouts of the tables by name.
        item_bytes: bytes of a weight.
    """

    def __init__(
        self,
        version: str,
        serial: int,
        segments: Sequence[_native.TableSegment],
        offsets: Mapping[tuple[str, Shard], int],
        tables: Mapping[str, TableLayout],
        item_bytes: int,
    ) -> None:
        super().__init__(version, serial, segments)
        self._offsets = offsets
        self._tables = tables
        self._item_bytes = item_bytes

    def features(self, lookups: Sequence[FeatureLookup]) -> _native.ShardedFeatures:
        """Returns the features for native code, in the order of `lookups`. They keep the
        segments."""
        return _native.ShardedFeatures(
            [
                (
                    lookup.key,
                    lookup.first_column * self._item_bytes,
                    lookup.means,
                    [self._columns(lookup.table, blocks) for blocks in self._pieces(lookup.table)],
                )
                for lookup in lookups
            ],
            tuple(self.segments),
        )

    def _pieces(self, table: str) -> list[list[Shard]]:
        return self._tables[table].column_pieces()

    def _columns(
        self, table: str, blocks: list[Shard]
    ) -> tuple[int, int, int, list[tuple[int, int, int]]]:
        # Ranks without rows come last: their partial sums would be zeros, and adding zeros can
        # change bits.
        return (
            blocks[0].first_column * self._item_bytes,
            blocks[0].columns * self._item_bytes,
            max(1, blocks[0].rows),
            [(block.owner, self._offsets[table, block], block.rows) for block in blocks],
        )
