"""Models whose steps are measured: collections of tables, a batch, and the ids of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchrec_bls.records import Positive, Whole

from ..problem.job import Job
from ..problem.options import ALL_RANKS, options_of
from ..problem.tables import COLUMN_WISE, ROW_WISE, TABLE_WISE, PlacedTable, Table, Workload
from .configurations import DIMS, Integers, TableConfiguration, draw_ids

#: Batches that a rank goes through in turn.
BATCHES = 4
# More than any plan needs.
_MEMORY = 1 << 60


@dataclass(frozen=True)
class Collection:
    """The tables of a module, with one feature each.

    Attributes:
        pooled: whether the module is an EmbeddingBagCollection, not an EmbeddingCollection.
        tables: tables of the module.
    """

    pooled: bool
    tables: tuple[TableConfiguration, ...]


@dataclass(frozen=True)
class StepModel:
    """A model that has only collections of tables.

    Attributes:
        name: name for people.
        collections: "c0", "c1" and so on in the model; their tables "t0", "t1", over all of them.
        batch: samples of a rank.
        seed: seed of the ids.
    """

    name: str
    collections: tuple[Collection, ...]
    batch: Positive
    seed: Whole

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepModel:
        """Reads what `as_json` wrote."""
        collections = tuple(
            Collection(each["pooled"], tuple(TableConfiguration(**t) for t in each["tables"]))
            for each in record["collections"]
        )
        return cls(**{**record, "collections": collections})

    @property
    def tables(self) -> list[tuple[str, bool, TableConfiguration]]:
        """Returns the module, whether it pools, and the configuration of each table."""
        return [
            (f"c{number}", collection.pooled, table)
            for number, collection in enumerate(self.collections)
            for table in collection.tables
        ]

    def ids(self, rank: int, batch: int) -> list[tuple[Integers, Integers]]:
        """Returns lengths and ids of each table, of one batch of a rank."""
        return [
            draw_ids(table, self.batch, np.random.default_rng([self.seed, rank, batch, number]))
            for number, (_, _, table) in enumerate(self.tables)
        ]

    def workload(self, ranks: int) -> Workload:
        """Returns the tables with the statistics of exactly the ids that are looked up."""
        batches = [[self.ids(rank, batch) for rank in range(ranks)] for batch in range(BATCHES)]
        tables, reuse = [], {}
        for number, (module, pooled, configuration) in enumerate(self.tables):
            table = Table(
                f"t{number}", configuration.rows, configuration.dim, module=module, pooled=pooled
            )
            tables.append(table)
            ids = [np.concatenate([of_rank[number][1] for of_rank in batch]) for batch in batches]
            reuse[table.path] = CountedReuse(
                pooling_factor=sum(map(len, ids)) / (BATCHES * ranks * self.batch),
                rows=float(np.mean([len(np.unique(each)) for each in ids])),
            )
        return Workload(tables, reuse)

    def job(self, ranks: int, cores: int, backend: str, *, training: bool) -> Job:
        """Returns the job on one host with so many cores; its memory is no limit."""
        memory = [_MEMORY] * ranks
        return Job(
            ranks, self.batch, memory, backend=backend, training=training, cores_per_host=cores
        )


@dataclass(frozen=True)
class CountedReuse:
    """Statistics of batches that were counted.

    Attributes:
        pooling_factor: mean ids of a sample.
        rows: mean number of different rows in a batch of all ranks.
    """

    pooling_factor: float
    rows: float

    def unique_rows(self, samples: float) -> float:
        """Returns `rows`: `samples` are those of the batches that were counted."""
        return self.rows


@dataclass(frozen=True)
class ModelRanges:
    """The ranges that step models are drawn from. Rows, ids and batches are log-uniform.

    Attributes:
        collections: largest number of collections.
        tables: smallest and largest number of tables, over all collections.
        rows: rows of a table.
        dims: possible columns of a table; tables of an EmbeddingCollection have one.
        pooling: ids of a sample in a table that pools.
        sequence: ids of a sample in a table that does not pool.
        batch: samples of a rank.
        weights_bytes: most bytes of all tables.
        elements: most elements that a rank looks up in a step; batches are halved until it holds.
    """

    collections: int = 2
    tables: tuple[int, int] = (1, 8)
    rows: tuple[float, float] = (200, 100_000)
    dims: tuple[int, ...] = DIMS
    pooling: tuple[float, float] = (1, 32)
    sequence: tuple[float, float] = (1, 8)
    batch: tuple[float, float] = (64, 1024)
    weights_bytes: int = 128 * 2**20
    elements: int = 6_000_000


def draw_step_model(name: str, seed: Sequence[int], ranges: ModelRanges) -> StepModel:
    """Returns a drawn model: each collection pools or not, and collections differ in all else."""
    random = np.random.default_rng(list(seed))
    tables = int(random.integers(ranges.tables[0], ranges.tables[1], endpoint=True))
    count = int(random.integers(1, min(ranges.collections, tables), endpoint=True))
    sizes = np.bincount(
        np.concatenate([np.arange(count), random.integers(count, size=tables - count)])
    )
    # Three of four collections pool.
    collections = [
        Collection(pooled, _tables(random, int(size), ranges, pooled))
        for size in sizes
        for pooled in [bool(random.random() < 0.75)]
    ]
    batch = round(_log_uniform(random, ranges.batch))
    looked_up = sum(
        table.pooling * table.dim for collection in collections for table in collection.tables
    )
    while batch * looked_up > ranges.elements:
        batch //= 2
    return StepModel(name, tuple(collections), max(batch, 1), int(random.integers(2**31)))


def _tables(
    random: np.random.Generator, count: int, ranges: ModelRanges, pooled: bool
) -> tuple[TableConfiguration, ...]:
    dims = random.choice(ranges.dims, size=count if pooled else 1).tolist()
    tables = []
    for number in range(count):
        dim = int(dims[number % len(dims)])
        most = ranges.weights_bytes / (4 * dim * ranges.tables[1])
        rows = min(_log_uniform(random, ranges.rows), most)
        ids = _log_uniform(random, ranges.pooling if pooled else ranges.sequence)
        skew = round(float(random.uniform(0.0, 1.3)), 2)
        tables.append(TableConfiguration(max(round(rows), 8), dim, round(ids, 2), skew))
    return tuple(tables)


def _log_uniform(random: np.random.Generator, low_high: tuple[float, float]) -> float:
    return float(np.exp(random.uniform(*np.log(low_high))))


@dataclass(frozen=True)
class StepTask:
    """Steps of a model under several plans, which take turns.

    Attributes:
        model: model that is sharded.
        backend: "bls" with the bounded-lag sharders, "gloo" with TorchRec's own.
        training: True for forward, backward and the optimizer, False for a forward.
        plans: plans by name.
        turns: number of steps of each plan.
    """

    model: StepModel
    backend: str
    training: bool
    plans: Mapping[str, Sequence[PlacedTable]]
    turns: int


def plans_by_hand(workload: Workload, job: Job) -> dict[str, tuple[PlacedTable, ...]]:
    """Returns plans by name that differ in all that a step's time depends on: all tables whole, all
    by rows, all by two columns, and all three in turn."""
    every = [options_of(index, table, job) for index, table in enumerate(workload.tables)]
    plans = {}
    for name, types in (
        (TABLE_WISE, (TABLE_WISE,)),
        (ROW_WISE, (ROW_WISE,)),
        (COLUMN_WISE, (COLUMN_WISE,)),
        ("mixed", (TABLE_WISE, COLUMN_WISE, ROW_WISE)),
    ):
        placed = []
        for index, (table, options) in enumerate(zip(workload.tables, every, strict=True)):
            of_type = {
                o.sharding_type: o for o in options if o.shards <= 2 or o.spread == ALL_RANKS
            }
            option = of_type.get(types[index % len(types)], options[0])
            first = 0 if option.spread == ALL_RANKS else index
            ranks = [(first + shard) % job.ranks for shard in range(option.shards)]
            placed.append(option.placed(table, ranks))
        plans[name] = tuple(placed)
    return plans
