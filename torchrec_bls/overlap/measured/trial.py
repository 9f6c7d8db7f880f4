"""Tries a plan beside the defaults: backwards in DistributedDataParallel."""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_bls.overlap.agreement import raise_together
from torchrec_bls.overlap.measured.dense_layers import dense_parameters
from torchrec_bls.overlap.measured.timed_backwards import TABLES, Clock, loss_of, tables_cut_off

# Each way is made anew in each turn: where its buckets are in memory changes its times. There are
# more turns of models that take less time.
_LEAST_TURNS, _MOST_TURNS, _SECONDS = 3, 9, 8.0
# Of a turn. DistributedDataParallel makes its buckets in the second backward.
_WARM_UP, _TIMED = 3, 5
# Standard deviation of a turn's gain before any is known, as a share of the default's time.
_OF_A_TURN = 0.02
_NINETEEN_OF_TWENTY = 1.645  # standard deviations


@dataclass(frozen=True)
class Trial:
    """Microseconds that backwards took with all their all-reduces, on the slowest rank: a median
    for each turn.

    Attributes:
        planned_us: with the plan.
        ddp_default_us: with DistributedDataParallel's default.
        torchrec_default_us: with TorchRec's default.
    """

    planned_us: tuple[float, ...]
    ddp_default_us: tuple[float, ...]
    torchrec_default_us: tuple[float, ...]

    @property
    def gain_over_ddp(self) -> "Gain":
        """Returns the share of DistributedDataParallel's time that the plan saves."""
        return Gain.of(self.planned_us, self.ddp_default_us)

    @property
    def gain_over_torchrec(self) -> "Gain":
        """Returns the share of TorchRec's time that the plan saves."""
        return Gain.of(self.planned_us, self.torchrec_default_us)


@dataclass(frozen=True)
class Gain:
    """A share of a default's time that a plan saves, by a trial.

    Attributes:
        mean: mean of the turns.
        least: share that the true gain exceeds in 19 of 20 such trials.
    """

    mean: float
    least: float

    @classmethod
    def of(cls, planned_us: Sequence[float], default_us: Sequence[float]) -> "Gain":
        """Returns the gain by the times of each turn."""
        gains = 1 - np.divide(planned_us, default_us)
        turns = len(gains)
        # The variance of a turn is that of the turns, and of two more as it is known beforehand.
        squares = float(np.square(gains - gains.mean()).sum()) + 2 * _OF_A_TURN**2
        mean = float(gains.mean())
        return cls(mean, mean - _NINETEEN_OF_TWENTY * (squares / (turns + 1) / turns) ** 0.5)


def try_out(
    model: nn.Module,
    batches: Iterable[Any],
    group: dist.ProcessGroup,
    planned: dict[str, Any],
    follow: Callable[[DistributedDataParallel], None],
) -> Trial:
    """Runs backwards with a plan and by default in turns, on all ranks at once.

    Copies of the model run; its embedding tables are shared, and left out.

    Args:
        model: a model that layers could be measured of.
        batches: batches for it.
        group: group of all ranks.
        planned: arguments of DistributedDataParallel for the plan.
        follow: makes a DistributedDataParallel with these arguments follow the plan.

    Raises:
        ValueError: a rank's model can't be copied.
    """
    ways: Any = (planned, follow), ({}, _as_it_is), ({"bucket_cap_mb": 25}, _as_it_is)
    batches = list(batches)
    turns: list[list[float]] = []
    begin, slowest_s = time.monotonic(), 0.0
    with tables_cut_off(model), torch.random.fork_rng(devices=[]):
        while len(turns) < _LEAST_TURNS or (len(turns) < _MOST_TURNS and slowest_s < _SECONDS):
            times = [_backwards_us(model, batches, group, *way) for way in ways]
            of_ranks: list[Any] = [None] * group.size()
            dist.all_gather_object(of_ranks, (times, time.monotonic() - begin), group)
            slowest_s = max(seconds for _, seconds in of_ranks)
            slowest_us = np.max([own for own, _ in of_ranks], axis=0)
            turns.append(np.median(slowest_us, axis=1).tolist())
    return Trial(*map(tuple, zip(*turns, strict=True)))


def _as_it_is(ddp: DistributedDataParallel) -> None:
    pass


def _copied(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Returns a copy that shares the embedding tables."""
    error = None
    try:
        tables = {id(each): each for each in model.modules() if isinstance(each, TABLES)}
        model = copy.deepcopy(model, tables)
    except Exception as refused:
        error = ValueError(
            f"the plan can't be tried on a copy of the model, since copying it failed: {refused}. "
            "Plan with a module that copy.deepcopy takes"
        )
    raise_together(error, group)
    return model


def _wrapped(
    model: nn.Module, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> DistributedDataParallel:
    tables = {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, TABLES)
        for name, _ in (*module.named_parameters(), *module.named_buffers())
    }
    # DistributedDataParallel's function for it would mark the tables too, which are not copied.
    model._ddp_params_and_buffers_to_ignore = tables  # type: ignore[assignment]
    return DistributedDataParallel(
        model,
        process_group=group,
        init_sync=False,
        gradient_as_bucket_view=True,
        **arguments,
    )


def _backwards_us(
    model: nn.Module,
    batches: Sequence[Any],
    group: dist.ProcessGroup,
    arguments: dict[str, Any],
    register: Callable[[DistributedDataParallel], None],
) -> list[float]:
    """Returns this rank's times with a new copy of the model, which is gone afterwards."""
    ddp = _wrapped(_copied(model, group), group, arguments)
    register(ddp)
    times = []
    parameters = list(dense_parameters(ddp.module).values())
    clock = Clock(parameters[0].device)
    for number, batch in enumerate(islice(cycle(batches), _WARM_UP + _TIMED)):
        for parameter in parameters:  # and not of the tables, which are the model's own
            parameter.grad = None
        loss = loss_of(ddp(*batch) if isinstance(batch, tuple) else ddp(batch))
        dist.barrier(group)  # begin together
        clock.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        clock.note()
        if number >= _WARM_UP:
            times += clock.since_begin_us()
    return times
