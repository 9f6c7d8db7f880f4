"""Training with messages follows its emulation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.quantized.dlrm import DLRM, Collectives, Training, replace_weight_gradient
from benchmarks.quantized.planted_clicks import PlantedClicks
from tests.processes import run
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.codecs.torchrec_codecs import RowCodec
from torchrec_bls.collective.quantized import quantized_all_reduce
from torchrec_bls.datasets import capped_cardinalities
from torchrec_bls.overlap.quantized_hook import QuantizedAllReduceState, quantized_all_reduce_hook

ROWS = capped_cardinalities(40)
DIM, TABLES = 16, len(ROWS)
BATCH, STEPS = 32, 8


class Exchange(torch.autograd.Function):
    """All-to-all of rows [samples, tables, dim]: what table owners have looked up goes to the ranks
    of the samples, gradients come back. Table t belongs to rank t modulo the world."""

    @staticmethod
    def forward(ctx, looked_up, forward, backward):
        ctx.backward_codec = backward
        world, rank = dist.get_world_size(), dist.get_rank()
        sent = list(looked_up.chunk(world))
        shapes = [(len(sent[rank]), len(owned(other, world)), DIM) for other in range(world)]
        arrived = swap(sent, shapes, forward)
        whole = torch.empty(len(sent[rank]), TABLES, DIM)
        for other, rows in enumerate(arrived):
            whole[:, owned(other, world)] = rows
        return whole

    @staticmethod
    def backward(ctx, gradient):
        world, rank = dist.get_world_size(), dist.get_rank()
        sent = [gradient[:, owned(other, world)] for other in range(world)]
        shapes = [(len(gradient), len(owned(rank, world)), DIM)] * world
        return torch.cat(swap(sent, shapes, ctx.backward_codec)), None, None


def owned(rank: int, world: int) -> list[int]:
    return list(range(rank, TABLES, world))


def swap(
    sent: list[torch.Tensor], shapes: list[tuple[int, int, int]], codec: Codec
) -> list[torch.Tensor]:
    """Sends one tensor to each rank, encoded, and returns what the ranks have sent."""
    row_codec = RowCodec(codec, DIM)
    messages = [row_codec.encode(rows) for rows in sent]
    sizes = [row_codec.calc_quantized_size(torch.Size(shape).numel()) for shape in shapes]
    arrived = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(
        arrived, torch.cat(messages), sizes, [message.numel() for message in messages]
    )
    parts = zip(arrived.split(sizes), shapes, strict=True)
    return [row_codec.decode(part).view(shape) for part, shape in parts]


def train(rank: int, world: int, how: Collectives, with_hook: bool) -> list[float]:
    """Returns the losses of all samples, which the ranks share out."""
    model = DLRM(ROWS, seed=2)
    module: nn.Module = model
    assert how.all_reduce is not None
    if with_hook:
        module = DistributedDataParallel(model)
        state = QuantizedAllReduceState(
            module, codec=how.all_reduce, algorithm=how.algorithm, group_size=how.group_size
        )
        module.register_comm_hook(state, quantized_all_reduce_hook)

    def weight_gradient(
        error: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        rows = gradient.T @ inputs / world
        if len(rows) % world:
            dist.all_reduce(rows)
        else:
            quantized_all_reduce(
                rows,
                dist.group.WORLD,
                codec=how.all_reduce,
                algorithm=how.algorithm,
                error=error,
                group_size=how.group_size,
            )
        return rows

    if not with_hook:
        for layer in model.layers:
            error = torch.zeros_like(layer.weight)
            replace_weight_gradient(layer, partial(weight_gradient, error))
    clicks = PlantedClicks(ROWS, seed=0).draw(STEPS * BATCH, seed=1)
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    mine = owned(rank, world)
    losses = []
    for first in range(0, STEPS * BATCH, BATCH):
        batch = clicks.rows(first, first + BATCH)
        ids = torch.from_numpy(batch.ids)
        # Ids travel as they are in any case: here every rank draws all of them.
        looked_up = model.look_up(ids)[:, mine].requires_grad_()
        rows = Exchange.apply(looked_up, how.forward, how.backward)
        dense = torch.from_numpy(batch.dense[own])
        logits = module(dense, rows)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(batch.labels[own])
        )
        loss.backward()
        with torch.no_grad():
            where = (ids + model.first_rows)[:, mine].reshape(-1)
            model.tables.index_add_(0, where, looked_up.grad.flatten(0, 1) / world, alpha=-1.0)
            for parameter in model.layers.parameters():
                if not with_hook and parameter.dim() == 1:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                parameter -= parameter.grad
                parameter.grad = None
            mean = loss.detach() / world
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def emulated(how: Collectives) -> list[float]:
    training = Training(DLRM(ROWS, seed=2), how)
    clicks = PlantedClicks(ROWS, seed=0).draw(STEPS * BATCH, seed=1)
    losses = []
    for first in range(0, STEPS * BATCH, BATCH):
        batch = clicks.rows(first, first + BATCH)
        arrays = (batch.dense, batch.ids, batch.labels)
        losses.append(training.step(*(torch.from_numpy(array) for array in arrays)))
    return losses


def difference(losses: list[float], others: list[float]) -> float:
    """Returns the largest relative difference of two trainings' losses."""
    return max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))


@pytest.mark.parametrize(
    ("world", "algorithm", "group_size"),
    [(2, "ring", 1), pytest.param(4, "recursive_doubling", 2, marks=pytest.mark.slow)],
)
def test_messages_of_layers_are_those_of_the_emulation(
    world: int, algorithm: str, group_size: int
) -> None:
    codecs = (Codec.UINT4, Codec.UINT2, Codec.UINT4)
    how = Collectives(world, *codecs, algorithm, compensated=True, group_size=group_size)
    expected = emulated(how)
    for losses in run(world, train, world, how, False):
        assert difference(losses, expected) < 2e-3
    for other in (Collectives(), replace(how, compensated=False)):
        assert difference(emulated(other), expected) > 4e-3, "the emulations could be mixed up"


@pytest.mark.parametrize(
    ("world", "algorithm", "group_size"),
    [(2, "recursive_doubling", 1), pytest.param(4, "ring", 1, marks=pytest.mark.slow)],
)
def test_the_hook_follows_the_emulation(world: int, algorithm: str, group_size: int) -> None:
    # The hook's rows are stretches of 256 values of all gradients, those of the paper a weight's.
    codecs = (Codec.UINT4, Codec.UINT2, Codec.UINT8)
    how = Collectives(world, *codecs, algorithm, compensated=True, group_size=group_size)
    expected = emulated(how)
    for losses in run(world, train, world, how, True):
        assert difference(losses, expected) < 4e-3
    assert difference(emulated(Collectives()), expected) > 8e-3
