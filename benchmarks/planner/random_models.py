"""Random models to be planned, by our planner and TorchRec's, and the statistics of their ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.report.prediction import Rating, rate
from torchrec_bls.sharding.torchrec.plan import from_sharding_plan
from torchrec_bls.sharding.torchrec.planner import BLSShardingPlanner
from torchrec_bls.sharding.torchrec.tables import workload_of


class TableSpec(NamedTuple):
    """A table: rows, columns, mean ids per sample, and the Zipf exponent of its ids."""

    rows: int
    dim: int
    pooling: float
    skew: float

    def shares(self) -> NDArray[np.float64]:
        """Share of the ids of each row, the most frequent first, (rows)."""
        weights = np.arange(1, self.rows + 1, dtype=float) ** -self.skew
        return weights / weights.sum()


Specs = Sequence[TableSpec]


class ZipfReuse(NamedTuple):
    """The statistics of a table's ids, as our planner asks for them, of one global batch."""

    pooling_factor: float
    samples: int
    expected_rows: float

    def unique_rows(self, samples: float) -> float:
        """The expected number of distinct rows that the batch reads."""
        assert samples == self.samples
        return self.expected_rows


class Task:
    """A random model to be planned for a job on CPUs, by our planner and by TorchRec's.

    `profile` is a name or file of costs. Both planners get the StorageReservation `reserve`, by
    default TorchRec's, and `limits`: what else ParameterConstraints have to say of every table.
    """

    def __init__(
        self, specs: Specs, sharder: Any, job: Job, profile: str, reserve: Any = None, **limits: Any
    ) -> None:
        self.module, self.sharders, self.job = module_of(specs), [sharder], job
        constraints, reuse = {}, {}
        for i, spec in enumerate(specs):
            constraints[f"t{i}"] = ParameterConstraints(pooling_factors=[spec.pooling], **limits)
            # Made here, where sample batches would be counted: it is no part of planning.
            rows = float(-np.expm1(-job.samples * spec.pooling * spec.shares()).sum())
            reuse[f"t{i}"] = ZipfReuse(spec.pooling, job.samples, rows)
        self.workload = workload_of(self.module, self.sharders, "cpu", 1, constraints, reuse)
        self.costs = ProfiledCosts(load_profile(profile))
        memory = job.memory_bytes[0]
        self.topology = Topology(world_size=job.ranks, compute_device="cpu", ddr_cap=memory)
        both: Any = {"storage_reservation": reserve, "constraints": constraints}
        known: Any = {"costs": self.costs, "reuse": reuse}
        known |= {"backend": job.backend, "cores_per_host": job.cores_per_host}
        self.planners = {
            "ours": BLSShardingPlanner(self.topology, job.batch, **both, **known),
            "torchrec": EmbeddingShardingPlanner(self.topology, job.batch, **both, debug=False),
        }

    def rating(self, plan: ShardingPlan) -> Rating:
        """What the plan is predicted to take; ValueError of one that can't be rated."""
        return rate(from_sharding_plan(plan, self.workload), self.workload, self.job, self.costs)


def random_specs(seed: int, tables: tuple[int, int], rows: tuple[float, float]) -> list[TableSpec]:
    """A random model: log-uniform rows, log-normal pooling, as in dlrm_datasets."""
    random = np.random.default_rng(seed)
    return [
        TableSpec(
            rows=int(10 ** random.uniform(*np.log10(rows))),
            dim=int(random.choice([16, 32, 64, 128])),
            pooling=float(np.clip(np.exp(random.normal(1.2, 1.2)), 1, 60)),
            skew=float(random.uniform(0.2, 1.2)),
        )
        for _ in range(random.integers(*tables, endpoint=True))
    ]


def module_of(specs: Specs) -> EmbeddingBagCollection:
    """The tables t0, t1, ... as an EmbeddingBagCollection, unsharded and without weights."""
    tables = [
        EmbeddingBagConfig(spec.rows, spec.dim, f"t{i}", feature_names=[f"f{i}"])
        for i, spec in enumerate(specs)
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
