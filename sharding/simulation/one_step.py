"""One step of a plan, in which all ranks begin together."""

from __future__ import annotations

from collections.abc import Iterable

from ..cost_interface import CostModel
from ..costs.host_costs import HostCosts
from ..problem.job import Job
from ..problem.tables import PlacedTable, Workload
from .engine.timeline import Timeline, simulate
from .plan_steps import program_of
from .program import Ranks, graph_of


def one_step(
    plan: Iterable[PlacedTable],
    workload: Workload,
    job: Job,
    model: CostModel,
    host: HostCosts | None = None,
) -> Timeline:
    """Returns the simulation of a step on the hosts of `job`.

    Args:
        plan: places of the tables.
        workload: the tables.
        job: job that the plan is for; without `cores_per_host` each rank has its own core.
        model: model of lookups and exchanges.
        host: costs beside lookups and exchanges; nothing by default.
    """
    program = program_of(plan, workload, job, model, host)
    cores = job.cores_per_host or job.host_ranks
    return simulate(graph_of(program, Ranks.on_hosts(job.ranks, job.host_ranks, cores), 1))


def step_us(
    plan: Iterable[PlacedTable],
    workload: Workload,
    job: Job,
    model: CostModel,
    host: HostCosts | None = None,
) -> float:
    """Returns the microseconds until all ranks are done; arguments are those of `one_step`."""
    return float(one_step(plan, workload, job, model, host).end.max())
