"""What else predicts a step: kernels summed up, no contention, Algorithm 1, TorchRec's estimator.

None of them knows what a step takes beside its lookups and exchanges. The paper's Algorithm 1 does,
by the host's overheads T1 to T5, which are all zero here.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec_bls.sharding.calibration.step_models import StepModel
from torchrec_bls.sharding.calibration.steps import Embeddings, sharders
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.tables import TABLE_WISE
from torchrec_bls.sharding.simulation.fit_host import MeasuredPlan
from torchrec_bls.sharding.simulation.one_step import one_step, step_us
from torchrec_bls.sharding.simulation.plan_steps import program_of

from benchmarks.simulator.two_streams import Op, Overheads, algorithm_1
from torchrec_bls.rank_steps import Begin, PlannedCollective, Wait, Work

_NOTHING = Overheads()


def sum_of_kernels_us(plan: MeasuredPlan, costs: ProfiledCosts) -> float:
    """Of the thread that has most to do, the paper's baseline."""
    graph = one_step(plan.plan, plan.workload, plan.job, costs).graph
    on_thread = graph.thread >= 0
    return float(np.bincount(graph.thread[on_thread], graph.work[on_thread]).max())


def uncontended_us(plan: MeasuredPlan, costs: ProfiledCosts) -> float:
    """The critical path, with a core for every thread."""
    alone = replace(plan.job, cores_per_host=2 * plan.job.ranks)
    return step_us(plan.plan, plan.workload, alone, costs)


def algorithm_1_us(plan: MeasuredPlan, costs: ProfiledCosts) -> float:
    """The paper's Algorithm 1 without T1 to T5; exchanges are collectives of their own stream."""
    ranks = range(plan.job.ranks)
    ops: list[list[Op]] = [[] for _ in ranks]
    waited = False

    def add(times: float | NDArray[np.float64], **how: bool) -> None:
        for rank, us in zip(ranks, np.broadcast_to(times, len(ranks)).tolist(), strict=True):
            ops[rank].append(Op(_NOTHING, (us,), **how))

    for op in program_of(plan.plan, plan.workload, plan.job, costs):
        match op:
            case Work(work) if np.any(work):
                add(work, depends=waited)
                waited = False
            case Begin(by=PlannedCollective(work, pause)):
                add(np.add(work, pause), communicates=True)
            case Begin(work_us=work):
                add(2 * np.asarray(work), communicates=True)  # reading takes as long
            case Wait():
                waited = True
    return algorithm_1(ops).total_us


def torchrec_us(plan: MeasuredPlan, model: StepModel) -> float:
    """TorchRec's estimate of the fullest rank, by which its planner chooses."""
    job = plan.job
    constraints = {
        placed.table.name: ParameterConstraints(
            [placed.sharding_type, TABLE_WISE],
            min_partition=max(shard.columns for shard in placed.shards),
            pooling_factors=[plan.workload.reuse_of(placed.table).pooling_factor],
        )
        for placed in plan.plan
    }
    topology = Topology(world_size=job.ranks, local_world_size=job.ranks, compute_device="cpu")
    estimator = EmbeddingPerfEstimator(topology, constraints, is_inference=not job.training)
    enumerator = EmbeddingEnumerator(topology, job.batch, constraints, estimator)
    options = enumerator.enumerate(Embeddings(model), sharders(job.backend))
    known = {(option.name, option.sharding_type): option.shards for option in options}
    ms: defaultdict[int, float] = defaultdict(float)
    for table, sharding_type, placed in (vars(each).values() for each in plan.plan):
        # It has no columns of all widths; a table of them is rated as a whole one then.
        shards = known.get((table.name, sharding_type)) or known[table.name, TABLE_WISE]
        total = sum(shard.perf.total for shard in shards)
        for index, shard in enumerate(placed):
            even = len(shards) == len(placed)
            ms[shard.rank] += shards[index].perf.total if even else total / len(placed)
    return 1e3 * max(ms.values())
