"""Times whole steps of models that DistributedModelParallel shards, on ranks of this machine."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import Topology

from torchrec_bls.processes import stream

from ..problem.tables import PlacedTable
from ..torchrec.plan import to_sharding_plan
from .collectives import slowest_us
from .step_models import BATCHES, StepModel, StepTask

_WARM_UPS = 3
_LEARNING_RATE = 0.01
# A step of a model as large as they are drawn takes tenths of a second.
_START_S, _MOST_STEP_S = 300.0, 5.0
_IMPORTED_ONCE = ("torchrec_bls.distributed.sharded_ec", "torchrec_bls.distributed.sharded_ebc")

Step = Callable[[], object]


def measure_steps(
    world_size: int, tasks: Sequence[StepTask], *, pinned: bool
) -> Iterator[dict[str, list[float]]]:
    """Times tasks in the same processes, one after the other.

    All plans of a task take turns step by step: a disturbance of the machine then hits all alike.
    A step begins on all ranks together and ends with the slowest one.

    Args:
        world_size: number of ranks, each with one thread.
        tasks: tasks to time.
        pinned: whether each rank has a core of its own.

    Yields:
        The microseconds of each turn by plan, for each task.

    Raises:
        RanksFailedError: a rank failed.
    """
    steps = sum(len(task.plans) * (_WARM_UPS + task.turns) for task in tasks)
    yield from stream(
        world_size,
        _rank,
        tuple(tasks),
        pinned,
        deadline_s=_START_S + steps * _MOST_STEP_S,
        backend="gloo",
        preload=_IMPORTED_ONCE,
    )


def _rank(rank: int, tasks: tuple[StepTask, ...], pinned: bool) -> Iterator[dict[str, list[float]]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    for task in tasks:
        yield _measure(task, rank)
        # Channels and tables of one model are freed before the next model's are made.
        gc.collect()
        dist.barrier()


def _measure(task: StepTask, rank: int) -> dict[str, list[float]]:
    batches = [batch_of(task.model, rank, number) for number in range(BATCHES)]
    steps = {
        name: step_of(
            task.model, plan, sharders(task.backend, name), batches, training=task.training
        )
        for name, plan in task.plans.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(_WARM_UPS + task.turns):
        # The same order on all ranks, another one in each turn.
        for index in np.random.default_rng(turn).permutation(len(names)):
            microseconds = slowest_us(steps[names[index]], 1, None)
            if turn >= _WARM_UPS:
                times[names[index]].append(round(microseconds, 1))
    return times


def step_of(
    model: StepModel,
    plan: Sequence[PlacedTable],
    using: list[Any],
    batches: list[KeyedJaggedTensor],
    *,
    training: bool,
) -> Step:
    """Returns a step of a model, which is sharded for it, on this rank.

    Args:
        model: model.
        plan: places of its tables.
        using: sharders of its collections.
        batches: ids of this rank that the steps look up in turn.
        training: True for forward, backward and the optimizer, False for a forward.
    """
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    sharded = DistributedModelParallel(
        Embeddings(model),
        device=torch.device("cpu"),
        plan=to_sharding_plan(plan, topology),
        sharders=using,
    )
    step = partial(_train if training else _infer, sharded, cycle(batches))
    if not training:
        sharded.eval()
    return step


def _train(model: DistributedModelParallel, batches: Iterator[KeyedJaggedTensor]) -> None:
    model.fused_optimizer.zero_grad()
    model(next(batches)).backward()
    model.fused_optimizer.step()


def _infer(model: DistributedModelParallel, batches: Iterator[KeyedJaggedTensor]) -> None:
    with torch.no_grad():
        model(next(batches))


def sharders(backend: str, name: str | None = None) -> list[Any]:
    """Returns the sharders of steps: TorchRec's over gloo, the bounded-lag ones over bls.

    Args:
        backend: "gloo" or "bls".
        name: name of the model; those that take turns need one each.
    """
    fused = {"learning_rate": _LEARNING_RATE}
    if backend == "gloo":
        return [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
    # The runtime is imported only by processes that measure it.
    from torchrec_bls import (
        BLSConfig,
        BLSEmbeddingBagCollectionSharder,
        BLSEmbeddingCollectionSharder,
    )

    config = BLSConfig(name=name)
    return [
        BLSEmbeddingBagCollectionSharder(fused, config=config),
        BLSEmbeddingCollectionSharder(fused, config=config),
    ]


class Embeddings(nn.Module):
    """The collections of a model, without weights yet; its output is the sum of all embeddings.

    Args:
        model: model with the tables.
    """

    def __init__(self, model: StepModel) -> None:
        super().__init__()
        self._pooled = [collection.pooled for collection in model.collections]
        number = 0
        for index, collection in enumerate(model.collections):
            config = EmbeddingBagConfig if collection.pooled else EmbeddingConfig
            whole = EmbeddingBagCollection if collection.pooled else EmbeddingCollection
            tables = []
            for table in collection.tables:
                tables.append(
                    config(
                        num_embeddings=table.rows,
                        embedding_dim=table.dim,
                        name=f"t{number}",
                        feature_names=[f"f{number}"],
                    )
                )
                number += 1
            self.add_module(f"c{index}", whole(tables=tables, device=torch.device("meta")))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the sum, a tensor without dimensions."""
        # All exchanges begin before one of them is waited for.
        outputs = [collection(ids) for collection in self.children()]
        sums = []
        for output, pooled in zip(outputs, self._pooled, strict=True):
            if pooled:
                sums.append(output.values().sum())
            else:
                sums.extend(jagged.values().sum() for jagged in output.values())
        return torch.stack(sums).sum()


def batch_of(model: StepModel, rank: int, number: int) -> KeyedJaggedTensor:
    """Returns the ids that a rank looks up in one of its batches."""
    tables = model.ids(rank, number)
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(len(tables))],
        values=torch.from_numpy(np.concatenate([ids for _, ids in tables])),
        lengths=torch.from_numpy(np.concatenate([each for each, _ in tables]).astype(np.int32)),
    )
