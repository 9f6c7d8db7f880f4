"""Plans the exchange of a model's dense gradients during its backward (LIBRA)."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DataParallelWrapper

from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.overlap.agreement import raise_together
from torchrec_bls.overlap.checks import check_ddp, check_origin, check_same_on_all_ranks
from torchrec_bls.overlap.hook import PlannedAllReduce, PlannedBucket, planned_all_reduce_hook
from torchrec_bls.overlap.measured.dense_layers import DenseLayer, dense_parameters, measure_layers
from torchrec_bls.overlap.measured.trial import Trial, try_out
from torchrec_bls.overlap.modes.mode import Mode, modes_of
from torchrec_bls.overlap.plan_file import PlanOrigin, read_plan, write_plan
from torchrec_bls.overlap.prediction import (
    Prediction,
    modes_as_measured,
    predict,
    typical_layers,
)
from torchrec_bls.overlap.report import as_text, trace_events
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group
from torchrec_bls.overlap.wrapper import PlannedDataParallelWrapper
from torchrec_bls.rendering.trace import write_trace
from torchrec_bls.sharding.costs.profile import Profile

_MIB = 2**20
# A plan that is predicted to save less is not tried.
_LEAST_PREDICTED = 0.02
# A default stays unless the plan surely saves so much: the same buckets take up to 3 % more or less
# in other memory.
_LEAST_GAIN = 0.015


def plan(
    model: nn.Module,
    profile: Profile,
    batches: Iterable[Any],
    *,
    group: dist.ProcessGroup | None = None,
    codecs: bool = False,
) -> "OverlapPlan":
    """Measures backwards of `model` on all ranks, and plans the all-reduces of its gradients.

    ```python
    plan = overlap.plan(model, profile, batches)
    ddp = DistributedDataParallel(model, **plan.ddp_kwargs())
    plan.register(ddp)
    ```

    All ranks call it together, and get the same plan. The model stays as it was. Embedding tables
    are not planned for. A plan that is predicted to save 2 % of a default's time is tried beside
    both defaults, on a copy of the model's dense part.

    Args:
        model: model that is not sharded and not in DistributedDataParallel. It returns its loss, or
            a tuple that begins with it; a tensor that is no scalar is summed up.
        profile: profile with the results of `torchrec-bls calibrate --overlap` on these ranks.
        batches: batches of the training's size; a tuple has the arguments of the model.
        group: group of the ranks that train together; None: the default group.
        codecs: whether gradients may travel encoded where that is faster. Encoding changes them.

    Raises:
        ValueError: model or batches can't be planned for, or ranks differ; the text says why.
        ProfileError: the profile has no modes of this backend and number of ranks.
    """
    _check_torch()
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call init_process_group first, on all ranks")
    batches = list(batches)
    measured = measure_layers(model, batches, group)
    dense = next(iter(dense_parameters(model).values()))
    if codecs and dense.dtype != torch.float32:
        raise ValueError(f"codecs are for gradients of float32, not {dense.dtype}: leave them out")
    backend = backend_of(group, dense.device)
    modes = [
        mode
        for mode in modes_of(profile, backend, dist.get_world_size(group))
        if codecs or not mode.changes_values
    ]
    in_place = modes_as_measured(modes, measured.layers, measured.reduced_us)
    groups = allocate(typical_layers(measured.layers), [mode.times for mode in in_place])
    origin = PlanOrigin(
        torch=torch.__version__,
        backend=backend,
        ranks=dist.get_world_size(group),
        profile=f"{profile.name}, {profile.measured_at}",
    )
    made = OverlapPlan(origin, measured.layers, measured.reduced_us, tuple(modes), tuple(groups))
    # A profile of another rank may predict something else, and there be no trial.
    check_same_on_all_ranks(made, group)
    predicted = made.prediction.gain_over_ddp, made.prediction.gain_over_torchrec
    if max(predicted) < _LEAST_PREDICTED:
        return made
    # In the trial nothing else uses the group during a backward.
    trial = try_out(
        model, batches, group, made._buckets_argument(), lambda ddp: made._follow(ddp, group)
    )
    return replace(made, trial=trial)


def load_plan(path: Path, profile: Profile) -> "OverlapPlan":
    """Reads what `OverlapPlan.save` wrote.

    Raises:
        ValueError: the file is no plan, or has another profile, torch or version.
        OSError: the file can't be read.
    """
    origin, layers, reduced_us, modes, groups, trial = read_plan(path)
    if origin.profile != (name := f"{profile.name}, {profile.measured_at}"):
        raise ValueError(
            f"{path} was made with the profile '{origin.profile}', this one is '{name}': make the "
            "plan anew"
        )
    if origin.torch != torch.__version__:
        raise ValueError(
            f"{path} was made with torch {origin.torch}, this is {torch.__version__}: make the "
            "plan anew"
        )
    return OverlapPlan(origin, layers, reduced_us, modes, groups, trial)


@dataclass(frozen=True)
class OverlapPlan:
    """Which gradients travel together, when and how.

    A default stays in place unless the plan was surely better when it was tried: by 1.5 % at least.

    Attributes:
        origin: torch, backend, ranks and profile that the plan was made for.
        layers: the model's layers, in the order in which their gradients are ready.
        reduced_us: measured times of one all-reduce of all gradients behind a backward.
        modes: calibrated ways for gradients to travel.
        groups: layers whose gradients travel together, with their mode and hold.
        trial: times of backwards with the plan and by default; None if nothing was to be gained.
    """

    origin: PlanOrigin
    layers: tuple[DenseLayer, ...]
    reduced_us: tuple[float, ...]
    modes: tuple[Mode, ...]
    groups: tuple[Group, ...]
    trial: Trial | None = None

    @cached_property
    def prediction(self) -> Prediction:
        """Returns the predicted backwards with the plan and by default."""
        return predict(self.layers, self.reduced_us, self.groups, self.modes)

    @cached_property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """Returns the planned groups, by their parameters."""
        buckets, first = [], 0
        for each in self.groups:
            last = first + each.layers
            own = self.layers[first:last]
            buckets.append(
                PlannedBucket(
                    parameters=tuple(name for layer in own for name in layer.parameters),
                    bytes=sum(layer.bytes for layer in own),
                    mode=self.modes[each.mode].name,
                )
            )
            first = last
        return tuple(buckets)

    @property
    def replaces_ddp_default(self) -> bool:
        """Returns whether it is surely better than DistributedDataParallel's buckets."""
        return self.trial is not None and self.trial.gain_over_ddp.least >= _LEAST_GAIN

    @property
    def replaces_torchrec_default(self) -> bool:
        """Returns whether it is surely better than TorchRec's buckets."""
        return self.trial is not None and self.trial.gain_over_torchrec.least >= _LEAST_GAIN

    def ddp_kwargs(self) -> dict[str, Any]:
        """Returns arguments for DistributedDataParallel; none where its default stays."""
        return self._buckets_argument() if self.replaces_ddp_default else {}

    def register(self, ddp: DistributedDataParallel) -> None:
        """Makes `ddp`, which was made with `ddp_kwargs`, follow the plan. All ranks call it
        together.

        Raises:
            ValueError: the plan is for another model, number of ranks, backend or torch, or differs
                between ranks, or `ddp` can't follow any plan.
        """
        self._register(ddp, self.replaces_ddp_default)

    def wrapper(self) -> DataParallelWrapper:
        """Returns the argument `data_parallel_wrapper` of DistributedModelParallel."""
        replaces = self.replaces_torchrec_default
        return PlannedDataParallelWrapper(
            self._buckets_argument() if replaces else {},
            lambda ddp: self._register(ddp, replaces),
        )

    def report(self) -> str:
        """Returns a text for people: the plan, its predicted times, and which defaults stay."""
        size = sum(layer.bytes for layer in self.layers)
        reduced_us = self.modes[0].times.alone_us(size), median(self.reduced_us)
        replaces = self.replaces_ddp_default, self.replaces_torchrec_default
        parts = self.origin, self.layers, self.buckets, self.prediction
        return as_text(*parts, reduced_us, self.trial, replaces)

    def trace(self, path: str | Path) -> None:
        """Writes the predicted timelines of plan and defaults for ui.perfetto.dev."""
        write_trace(Path(path), trace_events(self.prediction, self.modes))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, for `load_plan`."""
        write_plan(
            Path(path),
            (self.origin, self.layers, self.reduced_us, self.modes, self.groups, self.trial),
        )

    def _buckets_argument(self) -> dict[str, Any]:
        # A bucket closes with the gradient by which it reaches its size. The size in MiB is exact,
        # since a MiB is a power of two.
        return {"bucket_cap_mb_list": [bucket.bytes / _MIB for bucket in self.buckets]}

    def _register(self, ddp: DistributedDataParallel, replaces_default: bool) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"a plan is registered with a DistributedDataParallel, not {type(ddp)}"
            )
        group = ddp.process_group
        error = None
        try:
            check_ddp(ddp, self.layers)
            check_origin(self.origin, backend_of(group, device_of(ddp)), group)
        except ValueError as refused:
            error = refused
        raise_together(error, group)
        check_same_on_all_ranks(self, group)
        if replaces_default:
            # The thread's calls have no order with those of other threads, such as the sharded
            # modules' calls in this backward. In one group, ranks would match different calls with
            # each other.
            own = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=timeout_of(group)),
                backend=self.origin.backend,
                use_local_synchronization=True,
            )
            self._follow(ddp, own)

    def _follow(self, ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Has `ddp` reduce its buckets by the plan; nothing else uses `group` meanwhile."""
        state = PlannedAllReduce(ddp.module, self.buckets, group)
        ddp.register_comm_hook(state, planned_all_reduce_hook)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the model's trainable parameters."""
    return next(each for each in model.parameters() if each.requires_grad).device


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the backend that exchanges tensors of a device."""
    configured: str = dist.get_backend_config(group)
    by_device = dict(each.split(":") for each in configured.split(",") if ":" in each)
    return by_device.get(device.type, configured)


def _check_torch() -> None:
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise ValueError(
            f"torch {torch.__version__} has one size for all buckets: plans need torch 2.13 or "
            "newer, whose DistributedDataParallel has bucket_cap_mb_list"
        )
