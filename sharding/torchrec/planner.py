"""BLSShardingPlanner, a replacement for TorchRec's EmbeddingShardingPlanner."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner
from torchrec.distributed.utils import get_device_type

from ..cost_interface import AdditiveCosts, TableReuse
from ..costs.profile import ProfileError, check_kind, load_profile, shipped_profiles
from ..costs.profiled import ProfiledCosts
from ..problem.job import Job
from ..problem.options import NoOptionError, make_problem
from ..problem.tables import Workload
from ..report.plan_report import PlanReport, make_report
from ..search.infeasible import InfeasiblePlanError
from ..search.search import SearchResult, search
from ..simulation.choose_plan import PlanChoice, choose_plan
from .plan import to_sharding_plan
from .tables import FOR_GPUS, optimizers_of, workload_of

_TIERS = (
    ". Tables in host memory or on SSD (fused_uvm, fused_uvm_caching, key_value) are not planned: "
    "TorchRec's EmbeddingShardingPlanner has costs of them"
)
# Share of HBM, as in TorchRec's planner.
_RESERVED_SHARE = 0.15


class BLSShardingPlanner(ShardingPlanner):  # type: ignore[misc]
    """Plans shardings by the costs of a calibrated profile.

    It chooses one way for each table: whole, by columns of any width, by rows, or by the rows of
    one host. It keeps to what sharders and constraints allow and to each rank's memory. The aim is
    that the slowest rank is as fast as possible (docs/design/planner.md).

    Args:
        topology: the ranks and their hosts; None makes TorchRec's default one.
        batch_size: samples per rank and step.
        storage_reservation: memory to keep free. By default as in TorchRec's planner: dense
            parameters with gradients and optimizer, batches of ids, and 15 % of HBM.
        constraints: the user's constraints by name of the table.
        costs: costs on the machine, e.g. ProfiledCosts(load_profile("profile.json")). With None the
            planner warns, and plans with a shipped profile, of a machine that is hardly this one.
            No profile is of GPUs. Tables in HBM need costs of your own. For tables in host memory
            whose outputs are on GPUs, the planner takes a profile of CPUs, and warns.
        reuse: statistics by table ("module.table", or its name if only one table has it) or by
            feature, e.g. ReuseStatistics.from_batches(batches).
        backend: backend of the exchanges, "bls", "gloo" or "nccl". None: "bls" if there are
            bounded-lag sharders, else "nccl" for GPUs and "gloo" for CPUs. Name it for TorchRec's
            own sharders over a process group "bls".
        bound: iterations that ranks may be apart; None: the bound of the bounded-lag sharders that
            `plan` gets, or 0 without any. Leave it out: another bound than theirs is refused.
        training: whether there is a backward; None: at bound 0, unless outputs of tables in host
            memory are on GPUs.
        cores_per_host: number of cores that the ranks of a host share; None: each rank has its own.
        simulate: whether whole steps of the best plans found are simulated. Then the fastest one is
            taken if it is faster beyond doubt (docs/design/simulation.md). This needs a profile
            with host costs. It leaves out the model's dense layers, which are alike for all plans.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        storage_reservation: StorageReservation | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        costs: AdditiveCosts | None = None,
        reuse: Mapping[str, TableReuse] | None = None,
        backend: str | None = None,
        bound: int | None = None,
        training: bool | None = None,
        cores_per_host: int | None = None,
        simulate: bool = False,
    ) -> None:
        self._topology = topology or Topology(
            local_world_size=get_local_size(),
            world_size=dist.get_world_size(),
            compute_device=get_device_type(),
        )
        self._batch_size = batch_size or BATCH_SIZE
        self._reservation = storage_reservation or _torchrecs_reservation()
        self._constraints = constraints
        self._costs: AdditiveCosts = costs or _costs_of_another_machine(self._topology)
        self._reuse = reuse
        self._backend = backend
        self._bound = bound
        self._training = training
        self._cores_per_host = cores_per_host
        self._simulate = simulate
        self._last: tuple[Workload, SearchResult, PlanChoice | None] | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns the plan for `module`.

        Tables in host memory whose outputs are on GPUs, as bounded-lag sharders have them, take of
        the topology's DDR, and of no HBM.

        Raises:
            PlannerError: constraints contradict each other, or nothing fits into the memory; the
                text names the binding constraint, and how much is missing.
            ProfileError: steps are to be simulated, and the profile has no host costs for that; or
                the costs are of another kind of machine than the topology, or none were given for
                tables in HBM.
            ValueError: there is nothing to plan, sharders have several bounds or another one than
                this planner, the storage reservation is of another number of ranks, or tables in
                host memory whose outputs are on GPUs are to be trained.
        """
        device = self._topology.compute_device
        hosts = -(-self._topology.world_size // self._topology.local_world_size)
        workload = workload_of(module, sharders, device, hosts, self._constraints, self._reuse)
        for_gpus = self._are_on_host_for_gpus(workload)
        self._check_costs(for_gpus)
        job = self._job(module, sharders, for_gpus)
        if job.training:
            self._compare_optimizers(optimizers_of(module, sharders))
        try:
            found = search(make_problem(workload, job, self._costs))
        except InfeasiblePlanError as error:
            tiers = _TIERS if job.memory_kind == "HBM" else ""
            raise PlannerError(f"{error}{tiers}", PlannerErrorType.INSUFFICIENT_STORAGE) from error
        except NoOptionError as error:
            raise PlannerError(str(error), PlannerErrorType.STRICT_CONSTRAINTS) from error
        choice = self._choose([found, *found.others], workload, job) if self._simulate else None
        if choice is not None:
            found = [found, *found.others][choice.chosen]
        self._last = workload, found, choice
        return to_sharding_plan(found.plan, self._topology, self._constraints)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 and returns that plan on all ranks of `pg`, the default group if None.

        Raises:
            PlannerError, ValueError: an error that `plan` raises on rank 0; it is raised on all
                ranks.
            RuntimeError: there is no process group, planning failed otherwise, or the plan did not
                come within the group's timeout.
        """
        group = pg or dist.group.WORLD
        if group is None:
            raise RuntimeError("collective_plan needs a process group; plan goes without")
        try:
            plan, error = invoke_on_rank_and_broadcast_result(
                group, 0, self._plan_or_error, module, sharders or get_default_sharders()
            )
        except RuntimeError as failure:  # of the group: what fails in planning is returned
            raise RuntimeError(
                f"rank {group.rank()} of {group.size()} could not share rank 0's plan: {failure}. "
                "The others wait for it only as long as the group's timeout. If planning takes "
                "longer, pass a group with a longer one: "
                "pg=torch.distributed.new_group(timeout=datetime.timedelta(hours=2))"
            ) from failure
        if error is not None:
            raise error
        assert plan is not None
        return plan

    def _plan_or_error(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> tuple[ShardingPlan | None, Exception | None]:
        """Returns a plan or an error: the other ranks wait for one of them."""
        try:
            return self.plan(module, sharders), None
        except (PlannerError, ValueError) as error:
            return None, error
        except Exception as error:
            # The error itself may not be one that can be sent.
            failed = RuntimeError(f"planning failed on rank 0: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return None, failed

    def report(self) -> PlanReport:
        """Returns the report of the last plan made here. `collective_plan` plans on rank 0 only.

        Raises:
            RuntimeError: there is no plan yet.
        """
        if self._last is None:
            raise RuntimeError("there is no report before a plan (with collective_plan: on rank 0)")
        workload, found, choice = self._last
        return make_report(workload, found, self._costs, choice=choice)

    def _choose(self, found: Sequence[SearchResult], workload: Workload, job: Job) -> PlanChoice:
        host = None
        if isinstance(self._costs, ProfiledCosts):
            ranks_per_core = job.ranks_per_core
            host = self._costs.host(job.backend, job.training, job.ranks, ranks_per_core)
        if host is None:
            kind = "training" if job.training else "inference"
            raise ProfileError(
                f"simulate=True needs a profile with host costs of {kind} over {job.backend}: "
                "calibrate again with `torchrec-bls calibrate`, or leave simulate out"
            )
        return choose_plan([each.plan for each in found], workload, job, self._costs, host)

    def _are_on_host_for_gpus(self, workload: Workload) -> bool:
        """Returns whether the tables are in host memory, and their outputs on GPUs."""
        for_gpus = [table for table in workload.tables if table.kernel in FOR_GPUS]
        others = [table for table in workload.tables if table.kernel not in FOR_GPUS]
        if for_gpus and others:
            raise PlannerError(
                f"by their sharders, table '{for_gpus[0].path}' is in host memory for GPUs, "
                f"and table '{others[0].path}' in HBM, but one plan is for one memory: plan "
                "the modules one by one, or with TorchRec's EmbeddingShardingPlanner",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        return bool(for_gpus)

    def _check_costs(self, for_gpus: bool) -> None:
        if not isinstance(self._costs, ProfiledCosts):
            return
        if not for_gpus:
            check_kind(self._costs.profile, self._topology.compute_device)
            return
        warnings.warn(
            "outputs of tables in host memory will be on GPUs, and costs of that are not "
            f"calibrated: {self._costs.profile} has those of lookups and exchanges on CPUs, by "
            "which the shards are balanced. The plan's times are none of GPUs",
            stacklevel=3,
        )

    def _compare_optimizers(self, optimizers: Set[str]) -> None:
        """Warns if the costs were calibrated with another optimizer than the tables'."""
        if not isinstance(self._costs, ProfiledCosts):
            return
        profile = self._costs.profile
        # FBGEMM's "exact" optimizers are those without the prefix, with duplicate rows summed up
        # first.
        known = profile.optimizer.removeprefix("exact_")
        others = sorted(name for name in optimizers if name.removeprefix("exact_") != known)
        if others:
            warnings.warn(
                f"{profile} was calibrated with {profile.optimizer}, but tables "
                f"use {', '.join(others)}; backward times will be off: calibrate with "
                "`torchrec-bls calibrate --optimizer`",
                stacklevel=3,
            )

    def _job(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], for_gpus: bool
    ) -> Job:
        free = self._reservation.reserve(
            self._topology, self._batch_size, module, sharders, self._constraints
        )
        ranks, reservation = self._topology.world_size, type(self._reservation).__name__
        if len(free.devices) != ranks:
            raise ValueError(
                f"{reservation} leaves memory to {len(free.devices)} ranks, but the topology has "
                f"{ranks}: give a storage_reservation whose reserve() keeps the topology's ranks"
            )
        ddr = [max(device.storage.ddr, 0) for device in free.devices]
        on_cpu = self._topology.compute_device == "cpu"
        in_ddr = on_cpu or for_gpus
        hbm = [max(device.storage.hbm, 0) for device in free.devices]
        if not any(ddr if in_ddr else hbm):
            raise PlannerError(
                f"{reservation} reserves all memory of all ranks, and leaves none to tables: give "
                "a smaller storage_reservation, or a topology with more memory",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        bound = self._bound_of(sharders)
        if for_gpus and self._training:
            raise ValueError(
                "training is True, but tables in host memory have outputs on GPUs for inference "
                "only: leave training out, or shard for CPUs"
            )
        by_bound = bound == 0 and not for_gpus
        return Job(
            ranks=ranks,
            batch=self._batch_size,
            memory_bytes=ddr if in_ddr else hbm,
            ranks_per_host=min(self._topology.local_world_size, self._topology.world_size),
            backend=_backend_of(sharders, in_ddr) if self._backend is None else self._backend,
            bound=bound,
            training=by_bound if self._training is None else self._training,
            host_memory_bytes=None if in_ddr else ddr,
            cores_per_host=self._cores_per_host,
            memory_kind="DDR" if in_ddr else "HBM",
        )

    def _bound_of(self, sharders: Sequence[ModuleSharder[nn.Module]]) -> int:
        # An attribute decides, as in _backend_of.
        bounds = {
            type(sharder).__name__: sharder.exchange_bound
            for sharder in sharders
            if hasattr(sharder, "exchange_bound")
        }
        if len(set(bounds.values())) > 1:
            raise ValueError(f"sharders have the bounds {bounds}, but one plan is for one bound")
        of_sharders = next(iter(bounds.values()), None)
        if self._bound is None:
            return of_sharders or 0
        if of_sharders not in (None, self._bound):
            raise ValueError(
                f"bound is {self._bound}, but the sharders have bound {of_sharders}: leave bound "
                "out, and the plan is for theirs"
            )
        return self._bound


def _backend_of(sharders: Sequence[ModuleSharder[nn.Module]], in_ddr: bool) -> str:
    # An attribute decides, not the type: planning does not import the runtime.
    if "bls" in {getattr(sharder, "exchange_backend", None) for sharder in sharders}:
        return "bls"
    return "gloo" if in_ddr else "nccl"


def _torchrecs_reservation() -> StorageReservation:
    with warnings.catch_warnings():
        # TorchRec also logs at every plan that it reserves much for models on the meta device.
        warnings.simplefilter("ignore", FutureWarning)
        return HeuristicalStorageReservation(_RESERVED_SHARE)


def _costs_of_another_machine(topology: Topology) -> ProfiledCosts:
    name = shipped_profiles()[0]
    profile = load_profile(name)
    if topology.compute_device != "cpu":
        return ProfiledCosts(profile)  # a plan refuses it, or warns of it
    warnings.warn(
        f"BLSShardingPlanner has no costs and plans with the profile {name!r} of another machine: "
        "run `torchrec-bls calibrate --out profile.json` on this one and pass "
        'costs=ProfiledCosts(load_profile("profile.json"))',
        stacklevel=3,
    )
    return ProfiledCosts(profile)
