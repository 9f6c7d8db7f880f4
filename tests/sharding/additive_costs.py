"""A cost model small enough to be followed by hand, and random problems for it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.cost_interface import Estimate, LookupWork, Ops
from torchrec_bls.sharding.costs.collective_model import message_bytes
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import ANY_RANKS, ONE_HOST, options_of
from torchrec_bls.sharding.problem.tables import (
    SHARDING_TYPES,
    PlacedTable,
    Table,
    UniformReuse,
    Workload,
)


class AdditiveTestCosts:
    """Microseconds: an op 20, a shard 1 and its ids x columns / 1,000; backward twice that.

    All-to-alls: 30 and a thousandth of their `message_bytes` at `imbalance`; at 1 those of the rank
    with most. All-reduces: 50 and twice a thousandth of a rank's bytes.
    """

    op_us = 20.0
    all_reduce_us = 50.0

    def __init__(self, imbalance: float = 1.0) -> None:
        self.imbalance = imbalance

    def marginal_forward(self, works: Sequence[LookupWork]) -> NDArray[np.float64]:
        return np.array([1 + work.samples * work.pooling * work.dim / 1000 for work in works])

    def marginal_backward(
        self, works: Sequence[LookupWork], ops: Ops | None = None
    ) -> NDArray[np.float64]:
        return 2 * self.marginal_forward(works)

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        return self._estimate(self.op_us + self.marginal_forward(works).sum())

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        return self._estimate(self.op_us + self.marginal_backward(works).sum())

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float = 1.0,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        return self._estimate(30 + message_bytes(sent_bytes, received_bytes, self.imbalance) / 1000)

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float = 1.0
    ) -> Estimate:
        return self._estimate(self.all_reduce_us + 2 * bytes / 1000)

    @staticmethod
    def _estimate(time: float) -> Estimate:
        return Estimate(float(time), 0.8 * float(time), 1.25 * float(time))


def random_workload(
    seed: int,
    tables: int,
    types: Sequence[str] = SHARDING_TYPES[:3],
    largest: float = 1e5,
    modules: int = 1,
) -> Workload:
    random = np.random.default_rng(seed)
    made, reuse = [], {}
    for index in range(tables):
        rows = int(10 ** random.uniform(2, np.log10(largest)))
        dim, module = int(random.choice([32, 64, 128])), f"m{index % modules}"
        made.append(Table(f"t{index}", rows, dim, module, sharding_types=tuple(types)))
        reuse[made[-1].path] = UniformReuse(rows, float(random.uniform(0.5, 20)))
    return Workload(made, reuse)


def roomy(ranks: int, **others: object) -> Job:
    return Job(ranks, 64, [1 << 40] * ranks, **others)  # type: ignore[arg-type]


def random_plan(workload: Workload, job: Job, seed: int) -> tuple[PlacedTable, ...]:
    """A plan with a random option and random ranks for each table, memory aside."""
    random = np.random.default_rng(seed)
    plan = []
    for index, table in enumerate(workload.tables):
        options = options_of(index, table, job)
        if not table.pooled:
            # An EmbeddingCollection has one width of column-wise shards: leave them whole.
            options = [option for option in options if "/" not in option.group]
        option = options[random.integers(len(options))]
        ranks = np.arange(job.ranks)
        if option.spread == ANY_RANKS:
            ranks = random.permutation(job.ranks)
        elif option.spread == ONE_HOST:
            ranks += random.integers(job.ranks // job.host_ranks) * job.host_ranks
        plan.append(option.placed(table, ranks[: option.shards].tolist()))
    return tuple(plan)
