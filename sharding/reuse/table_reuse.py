"""Finds the statistics of each table among a user's reuse statistics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost_interface import TableReuse


@dataclass(frozen=True)
class TableNames:
    """The names that a table can be called by.

    Attributes:
        module: path of its module in the model.
        name: its own name, unique within the module.
        features: names of the features that are looked up in it.
    """

    module: str
    name: str
    features: Sequence[str]


@dataclass(frozen=True)
class JointReuse:
    """The features of one table, counted apart: a row that several features read counts for
    each."""

    features: Sequence[TableReuse]

    @property
    def pooling_factor(self) -> float:
        """Mean ids per sample."""
        return sum(feature.pooling_factor for feature in self.features)

    def unique_rows(self, samples: float) -> float:
        """Distinct rows that a batch of `samples` reads, at most."""
        return sum(feature.unique_rows(samples) for feature in self.features)


def find_reuse(
    tables: Sequence[TableNames], reuse: Mapping[str, TableReuse]
) -> tuple[list[TableReuse | None], list[str]]:
    """Returns the statistics of each table, or None, and the keys that belong to no table.

    A key is a table's path ("module.table"), the name of exactly one table, or a feature's name. A
    table has statistics by features only if each of its features has some.
    """
    times = Counter(table.name for table in tables)
    found: list[TableReuse | None] = []
    used: set[str] = set()
    for table in tables:
        path = f"{table.module}.{table.name}" if table.module else table.name
        own = [path] + [table.name] * (times[table.name] == 1)
        keys = [key for key in own if key in reuse][:1]
        if not keys and table.features and all(feature in reuse for feature in table.features):
            keys = list(table.features)
        used.update(keys)
        parts = [reuse[key] for key in keys]
        found.append(JointReuse(parts) if len(parts) > 1 else parts[0] if parts else None)
    return found, sorted(set(reuse) - used)
