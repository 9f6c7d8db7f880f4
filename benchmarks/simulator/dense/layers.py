"""The dense ops of a torch model, with their shapes for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from benchmarks.simulator.dense.ops import WORD_BYTES, DenseOp

_ELEMENTWISE: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.GELU: "gelu"}
_KNOWN = (
    "Linear, LayerNorm, Dropout, ReLU, GELU, Identity, Sequential, TransformerEncoder and "
    "TransformerEncoderLayer"
)
_FUNCTIONS = {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}


def dense_ops(
    layers: nn.Module | Sequence[nn.Module],
    shape: Sequence[int],
    *,
    input_gradient: bool = False,
) -> list[DenseOp]:
    """Lists the ops of layers in a training step, in the order of the forward.

    Args:
        layers: a module, or several that follow each other.
        shape: shape of the input, its columns last. For a transformer it is (length, batch,
            columns), or (batch, length, columns) where the layer has `batch_first`.
        input_gradient: whether the input needs a gradient, as embeddings do and data do not.

    Raises:
        ValueError: a layer is of another kind, or does not fit its input; the message has its path.
    """
    walk = _Walk(tuple(shape), input_gradient)
    if isinstance(layers, nn.Module):
        walk.visit(layers, "")
    else:
        walk.follow(layers, "")
    return walk.ops


class _Walk:
    """The ops found so far, and the input of the next layer.

    Attributes:
        ops: ops found so far.
    """

    def __init__(self, shape: tuple[int, ...], gradient: bool) -> None:
        if len(shape) < 2 or min(shape) < 1:
            raise ValueError(f"the input's shape is {shape}: give all sizes, the batch's too")
        self._shape, self._gradient = shape, gradient
        self.ops: list[DenseOp] = []

    def follow(self, layers: Sequence[nn.Module], path: str) -> None:
        """Goes through layers one after the other."""
        for number, layer in enumerate(layers):
            self.visit(layer, f"{path}.{number}" if path else str(number))

    def visit(self, layer: nn.Module, path: str) -> None:
        """Goes through a layer."""
        match layer:
            case nn.Sequential():
                self.follow(list(layer), path)
            case nn.TransformerEncoder():
                self.follow(list(layer.layers), f"{path}.layers".lstrip("."))
                if layer.norm is not None:
                    self.visit(layer.norm, f"{path}.norm".lstrip("."))
            case nn.TransformerEncoderLayer():
                self._transformer(layer, path)
            case nn.Linear():
                self._linear(layer.in_features, list(layer.parameters()), path)
            case nn.LayerNorm():
                self._norm(layer, path)
            case nn.Dropout():
                self._dropout(layer)
            case nn.Identity():
                pass
            case _ if type(layer) in _ELEMENTWISE:
                self._elementwise(_ELEMENTWISE[type(layer)])
            case _:
                raise ValueError(f"{_called(path, layer)}: known are {_KNOWN}")

    def _transformer(self, layer: nn.TransformerEncoderLayer, path: str) -> None:
        attention = layer.self_attn
        if len(self._shape) != 3 or attention.in_proj_weight is None:
            raise ValueError(
                f"{_called(path, layer)}: its input is {self._shape}, but must have three "
                "dimensions, of which keys and values are as wide as queries"
            )
        parts = (self._attend, layer.norm1), (self._feed_forward, layer.norm2)
        for part, norm in parts:
            unchanged = self._gradient
            if layer.norm_first:
                self._norm(norm, path)
            part(layer, path)
            self._elementwise("add", input_gradient=unchanged)
            if not layer.norm_first:
                self._norm(norm, path)

    def _attend(self, layer: nn.TransformerEncoderLayer, path: str) -> None:
        attention = layer.self_attn
        columns = attention.embed_dim
        length, batch = self._shape[:2]
        if attention.batch_first:
            length, batch = batch, length
        packed = [attention.in_proj_weight, attention.in_proj_bias]
        self._linear(columns, [each for each in packed if each is not None], path)
        self.ops.append(
            DenseOp(
                "attention_dropout" if attention.dropout else "attention",
                rows=batch * attention.num_heads,
                width=length,
                inner=attention.head_dim,
                input_gradient=self._gradient,
            )
        )
        self._shape = (*self._shape[:-1], columns)
        self._linear(columns, list(attention.out_proj.parameters()), path)
        self._dropout(layer.dropout1)

    def _feed_forward(self, layer: nn.TransformerEncoderLayer, path: str) -> None:
        self.visit(layer.linear1, f"{path}.linear1".lstrip("."))
        activation = layer.activation
        if isinstance(activation, nn.Module):
            self.visit(activation, f"{path}.activation".lstrip("."))
        elif activation in _FUNCTIONS:
            self._elementwise(_FUNCTIONS[activation])
        else:
            raise ValueError(f"{_called(path, layer)}, whose activation is no ReLU and no GELU")
        self._dropout(layer.dropout)
        self.visit(layer.linear2, f"{path}.linear2".lstrip("."))
        self._dropout(layer.dropout2)

    def _linear(self, inner: int, parameters: Sequence[torch.Tensor], path: str) -> None:
        """Adds a product with the first of `parameters`, and a sum with the second one."""
        if self._shape[-1] != inner:
            raise ValueError(f"layer '{path}' takes {inner} columns, its input is {self._shape}")
        self._shape = (*self._shape[:-1], len(parameters[0]))
        self._add("linear", parameters, inner=inner)

    def _norm(self, layer: nn.LayerNorm, path: str) -> None:
        if tuple(layer.normalized_shape) != self._shape[-1:]:
            raise ValueError(
                f"{_called(path, layer)} of {layer.normalized_shape}, its input is {self._shape}"
            )
        self._add("layer_norm", list(layer.parameters()))

    def _dropout(self, layer: nn.Dropout) -> None:
        if layer.p > 0:
            self._elementwise("dropout")

    def _elementwise(self, kind: str, *, input_gradient: bool | None = None) -> None:
        self._add(kind, (), input_gradient=input_gradient)

    def _add(
        self,
        kind: str,
        parameters: Sequence[torch.Tensor],
        *,
        inner: int = 1,
        input_gradient: bool | None = None,
    ) -> None:
        trained = [each for each in parameters if each.requires_grad]
        self.ops.append(
            DenseOp(
                kind,
                rows=prod(self._shape[:-1]),
                width=self._shape[-1],
                inner=inner,
                input_gradient=self._gradient if input_gradient is None else input_gradient,
                gradient_bytes=tuple(WORD_BYTES * each.numel() for each in trained),
            )
        )
        self._gradient = self._gradient or bool(trained)


def _called(path: str, layer: nn.Module) -> str:
    return f"layer '{path}' is a {type(layer).__name__}"
