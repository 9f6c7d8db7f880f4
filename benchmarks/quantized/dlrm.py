"""The DLRM of the paper (Quantized Collectives, table 1), trained by N emulated nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchrec_bls.codecs import emulation
from torchrec_bls.codecs.rows import Codec

EMBEDDING_DIM = 16
BOTTOM_MLP = (13, 512, 256, 64, EMBEDDING_DIM)
TOP_MLP = (512, 256, 1)
LEARNING_RATE = 1.0

# Sums the gradient of a weight [out, in] over the nodes: takes the layer's place in the model, the
# gradients of its outputs [batch, out] and its inputs [batch, in], node by node.
WeightGradient = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Collectives:
    """What travels how.

    Attributes:
        nodes: among which batches are shared out; a power of two.
        forward: codec of the embeddings' all-to-all.
        backward: codec of their gradients' all-to-all.
        all_reduce: codec of the weights' gradients; None: they are summed as on one node.
        algorithm: "ring" or "recursive_doubling".
        compensated: whether the all-reduce carries its errors forward.
        group_size: of recursive doubling.
    """

    nodes: int = 1
    forward: Codec = Codec.FP32
    backward: Codec = Codec.FP32
    all_reduce: Codec | None = None
    algorithm: str = "ring"
    compensated: bool = False
    group_size: int = 8


class DLRM(nn.Module):
    """Bottom MLP, one row of each table, dot products of all pairs, top MLP, one logit.

    Weights are drawn as facebookresearch/dlrm draws them.

    Args:
        rows_per_table: rows of the tables, which are one matrix.
        seed: of the weights.
    """

    def __init__(self, rows_per_table: Sequence[int], *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tables = len(rows_per_table)
        rows = torch.tensor(rows_per_table)
        self.register_buffer("first_rows", rows.cumsum(0) - rows, persistent=False)
        limits = rows.double().rsqrt().float().repeat_interleave(rows)[:, None]
        uniform = torch.rand(int(rows.sum()), EMBEDDING_DIM, generator=generator)
        self.tables = nn.Parameter((2 * uniform - 1) * limits, requires_grad=False)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        features = EMBEDDING_DIM + self.pairs.shape[1]
        self.bottom_layers = len(BOTTOM_MLP) - 1
        self.layers = nn.ModuleList(
            _linear(inputs, outputs, generator)
            for sizes in (BOTTOM_MLP, (features, *TOP_MLP))
            for inputs, outputs in pairwise(sizes)
        )

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ids [batch, tables] as [batch, tables, dim]."""
        return self.tables[ids + self.first_rows]

    def forward(
        self,
        dense: torch.Tensor,
        embeddings: torch.Tensor,
        weight_gradient: WeightGradient | None = None,
    ) -> torch.Tensor:
        """Returns logits [batch] of dense [batch, 13] and embeddings [batch, tables, dim]."""
        bottom = dense
        for place in range(self.bottom_layers):
            bottom = self._apply(place, bottom, weight_gradient).relu()
        vectors = torch.cat([bottom[:, None], embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        top = torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], dim=1)
        for place in range(self.bottom_layers, len(self.layers) - 1):
            top = self._apply(place, top, weight_gradient).relu()
        return self._apply(len(self.layers) - 1, top, weight_gradient).squeeze(1)

    def _apply(
        self, place: int, inputs: torch.Tensor, weight_gradient: WeightGradient | None
    ) -> torch.Tensor:
        layer = self.layers[place]
        if weight_gradient is None:
            return layer(inputs)
        return _Linear.apply(inputs, layer.weight, layer.bias, place, weight_gradient)


class _Linear(torch.autograd.Function):
    """A linear layer whose weight has another gradient than the sum over the batch."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, *of_weight: Any) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.place, ctx.weight_gradient = of_weight
        return torch.addmm(bias, inputs, weight.T)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needed = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = ctx.weight_gradient(ctx.place, gradient, inputs)
        return needed, of_weight, gradient.sum(0), None, None


@dataclass
class Training:
    """Plain SGD with the collectives of N nodes, whose local batches lie behind each other.

    As in the paper, the all-reduce is quantized for weights whose rows the nodes can share out
    evenly, and each row of a weight, and of an embedding, has its own scale. Biases and the other
    weights are summed exactly.

    Attributes:
        model: is trained.
        collectives: what travels how.
    """

    model: DLRM
    collectives: Collectives
    _errors: dict[int, torch.Tensor] = field(default_factory=dict)
    # Each layer's gradients by node: hundreds of MB, which cost more to allocate than to fill.
    _of_nodes: dict[int, torch.Tensor] = field(default_factory=dict)

    def step(self, dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Trains on a batch and returns its loss.

        Args:
            dense: [batch, 13], float32.
            ids: [batch, tables], int64.
            labels: [batch], float32.
        """
        rows = _travel(self.model.look_up(ids), self.collectives.forward).requires_grad_()
        logits = self.model(dense, rows, self._weight_gradient)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        assert rows.grad is not None
        self._update_tables(ids, _travel(rows.grad, self.collectives.backward))
        with torch.no_grad():
            for parameter in self.model.layers.parameters():
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                parameter.grad = None
        return loss.item()

    def _update_tables(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        rows = (ids + self.model.first_rows).flatten()
        self.model.tables.index_add_(0, rows, gradients.flatten(0, 1), alpha=-LEARNING_RATE)

    def _weight_gradient(
        self, place: int, gradient: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        how = self.collectives
        if how.all_reduce is None or gradient.shape[1] % how.nodes:
            return gradient.T @ inputs
        if place not in self._of_nodes:
            shape = (how.nodes, gradient.shape[1], inputs.shape[1])
            self._of_nodes[place] = torch.empty(shape)
            if how.compensated:
                self._errors[place] = torch.zeros(shape)
        of_nodes = torch.bmm(
            gradient.view(how.nodes, -1, gradient.shape[1]).transpose(1, 2),
            inputs.view(how.nodes, -1, inputs.shape[1]),
            out=self._of_nodes[place],
        )
        error = self._errors.get(place)
        if how.algorithm == "ring":
            return emulation.ring_all_reduce(of_nodes, how.all_reduce, error)
        return emulation.recursive_doubling_all_reduce(
            of_nodes, how.all_reduce, error, how.group_size
        )


def _travel(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns what arrives of [batch, tables, dim] in an all-to-all."""
    if codec == Codec.FP32:
        return rows
    return emulation.all_to_all(rows.reshape(-1, rows.shape[-1]), codec).view(rows.shape)


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.normal_(0, (2 / (inputs + outputs)) ** 0.5, generator=generator)
        layer.bias.normal_(0, outputs**-0.5, generator=generator)
    return layer
