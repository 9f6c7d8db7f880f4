"""The DLRM of the paper (Quantized Collectives, table 1), trained by N emulated nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from benchmarks.quantized import emulation
from torchrec_bls.codecs.rows import Codec

EMBEDDING_DIM = 16
BOTTOM_MLP = (13, 512, 256, 64)  # and the embeddings' dimension
TOP_MLP = (512, 256, 1)
LEARNING_RATE = 1.0


@dataclass(frozen=True)
class Collectives:
    """What travels how."""

    nodes: int = 1  # among which batches are shared out; a power of two
    forward: Codec = Codec.FP32  # of the embeddings' all-to-all
    backward: Codec = Codec.FP32  # of their gradients' all-to-all
    all_reduce: Codec | None = None  # of the weights' gradients; None: summed as on one node
    algorithm: str = "ring"  # or "recursive_doubling"
    compensated: bool = False  # whether the all-reduce carries its errors forward
    group_size: int = 8  # of recursive doubling

    def sum_gradients(self, of_nodes: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
        """Sums gradients [nodes, rows, columns]; `error`, of the same shape, is carried forward."""
        if self.algorithm == "ring":
            return emulation.ring_all_reduce(of_nodes, self.all_reduce, error)
        return emulation.recursive_doubling_all_reduce(
            of_nodes, self.all_reduce, error, self.group_size
        )


class DLRM(nn.Module):
    """Bottom MLP, one row of each table, dot products of all pairs, top MLP, one logit.

    Weights are drawn as facebookresearch/dlrm draws them. The tables are one matrix.
    """

    def __init__(
        self, rows_per_table: Sequence[int], *, seed: int, dim: int = EMBEDDING_DIM
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tables = len(rows_per_table)
        rows = torch.tensor(rows_per_table)
        self.register_buffer("first_rows", rows.cumsum(0) - rows, persistent=False)
        limits = rows.double().rsqrt().float().repeat_interleave(rows)[:, None]
        uniform = torch.rand(int(rows.sum()), dim, generator=generator)
        self.tables = nn.Parameter((2 * uniform - 1) * limits, requires_grad=False)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        features = dim + self.pairs.shape[1]
        self.layers = nn.ModuleList()
        for sizes in ((*BOTTOM_MLP, dim), (features, *TOP_MLP)):
            for inputs, outputs in pairwise(sizes):
                layer = nn.Linear(inputs, outputs)
                nn.init.xavier_normal_(layer.weight, generator=generator)
                nn.init.normal_(layer.bias, std=outputs**-0.5, generator=generator)
                self.layers.append(layer)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ids [batch, tables] as [batch, tables, dim]."""
        return self.tables[ids + self.first_rows]

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch] of dense [batch, 13] and embeddings [batch, tables, dim]."""
        bottom = dense
        for layer in self.layers[: len(BOTTOM_MLP)]:
            bottom = layer(bottom).relu()
        vectors = torch.cat([bottom[:, None], embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        top = torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], dim=1)
        for layer in self.layers[len(BOTTOM_MLP) : -1]:
            top = layer(top).relu()
        return self.layers[-1](top).squeeze(1)


def replace_weight_gradient(layer: nn.Linear, gradient_of: Callable[..., torch.Tensor]) -> None:
    """Gives the weight [out, in] another gradient than the sum over the batch: what `gradient_of`
    makes of the gradients of the outputs [batch, out] and of the inputs [batch, in]."""
    layer.weight.requires_grad_(False)

    def after_forward(layer: nn.Linear, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> None:
        def after_backward(gradient: torch.Tensor) -> None:
            layer.weight.grad = gradient_of(gradient, *inputs)

        if outputs.requires_grad:
            outputs.register_hook(after_backward)

    layer.register_forward_hook(after_forward)


class RowwiseAdagrad:
    """What TorchRec trains tables with for the most part: each row has a rate of its own."""

    def __init__(self, tables: torch.Tensor, rate: float) -> None:
        self._tables, self._rate = tables, rate
        self._squares = torch.zeros(len(tables))

    def __call__(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        own, of_each = rows.unique(return_inverse=True)
        summed = torch.zeros(len(own), gradients.shape[1]).index_add_(0, of_each, gradients)
        self._squares[own] += summed.square().mean(dim=1)
        steps = self._rate / (self._squares[own].sqrt() + 1e-8)
        self._tables[own] -= steps[:, None] * summed


class Training:
    """SGD with the collectives of N nodes, whose local batches lie behind each other; `update`
    trains rows of the tables by their gradients in its place.

    As in the paper, the all-reduce is quantized for weights whose rows the nodes can share out
    evenly, and each row of a weight, and of an embedding, has its own scale. Biases and the other
    weights are summed exactly.
    """

    def __init__(
        self,
        model: DLRM,
        collectives: Collectives,
        rate: float = LEARNING_RATE,
        update: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        self.model = model
        self._update = update or partial(model.tables.index_add_, 0, alpha=-rate)
        self._collectives = collectives
        self._optimizer = torch.optim.SGD(model.layers.parameters(), rate)
        for layer in model.layers:
            if collectives.all_reduce is not None and layer.out_features % collectives.nodes == 0:
                replace_weight_gradient(layer, _all_reduce(collectives, layer.weight.shape))

    def step(
        self,
        dense: torch.Tensor,
        ids: torch.Tensor,
        labels: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> float:
        """Trains on dense [batch, 13], ids [batch, tables] and labels [batch]; returns the loss.

        `forward` says what arrives of embeddings [batch, tables, dim], if not the collectives'.
        """
        forward = forward or partial(_travel, codec=self._collectives.forward)
        rows = forward(self.model.look_up(ids)).requires_grad_()
        logits = self.model(dense, rows)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        arrived = _travel(rows.grad, self._collectives.backward).flatten(0, 1)
        where = (ids + self.model.first_rows).flatten()
        self._update(where, arrived)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def _all_reduce(how: Collectives, shape: torch.Size) -> Callable[..., torch.Tensor]:
    """Returns what sums the gradients of a weight over the nodes."""
    # Hundreds of MB for all weights, which cost more to allocate than to fill.
    of_nodes = torch.empty(how.nodes, *shape)
    error = torch.zeros_like(of_nodes) if how.compensated else None

    def weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        by_node = gradient.unflatten(0, (how.nodes, -1)), inputs.unflatten(0, (how.nodes, -1))
        torch.bmm(by_node[0].transpose(1, 2), by_node[1], out=of_nodes)
        return how.sum_gradients(of_nodes, error)

    return weight_gradient


def _travel(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns what arrives of [batch, tables, dim] in an all-to-all."""
    return emulation.all_to_all(rows.flatten(0, 1), codec).view(rows.shape)
