"""What torch models do, beside what torch itself says of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.simulator.dense.layers import dense_ops
from benchmarks.simulator.dense.ops import DenseOp

_PRODUCTS = (torch.ops.aten.addmm, torch.ops.aten.mm)


def _tower() -> nn.Module:
    """A DLRM's: the data need no gradient."""
    return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())


def _transformer(norm_first: bool = False, dropout: float = 0.1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        32, 4, 48, dropout=dropout, activation="gelu", norm_first=norm_first
    )
    norm = nn.LayerNorm(32) if norm_first else None
    return nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)


_MODELS = [
    (_tower(), (20, 13)),
    (_transformer(), (7, 3, 32)),
    (_transformer(norm_first=True), (7, 3, 32)),
]


def _products(ops: list[DenseOp], backward: bool) -> int:
    linear = [op for op in ops if op.kind == "linear"]
    each = ((op, 1 + op.input_gradient if backward else 1) for op in linear)
    return sum(times * op.rows * op.width * op.inner for op, times in each)


@pytest.mark.parametrize(("model", "shape"), _MODELS)
@pytest.mark.parametrize("input_gradient", [True, False])
def test_multiplications_are_those_that_torch_counts(
    model: nn.Module, shape: tuple[int, ...], input_gradient: bool
) -> None:
    ops = dense_ops(model, shape, input_gradient=input_gradient)
    source = torch.randn(shape, requires_grad=input_gradient)

    def counted(counter: FlopCounterMode) -> int:
        counts = counter.get_flop_counts()["Global"]
        return sum(count for op, count in counts.items() if op in _PRODUCTS) // 2

    with FlopCounterMode(display=False) as forward:
        output = model(source)
    assert _products(ops, backward=False) == counted(forward)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert _products(ops, backward=True) == counted(backward)


@pytest.mark.parametrize(("model", "shape"), _MODELS)
def test_gradients_become_ready_from_the_last_to_the_first(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    ready: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(4 * p.numel()))
        for parameter in model.parameters()
    ]
    model(torch.randn(shape)).sum().backward()
    for hook in hooks:
        hook.remove()
    ops = dense_ops(model, shape)
    expected = [size for op in reversed(ops) for size in reversed(op.gradient_bytes)]
    assert expected == ready


def test_a_tower_by_hand() -> None:
    first, second = (13 * 64 * 4, 64 * 4), (64 * 16 * 4, 16 * 4)
    assert dense_ops(_tower(), (20, 13)) == [
        DenseOp("linear", 20, 64, 13, input_gradient=False, gradient_bytes=first),
        DenseOp("relu", 20, 64),
        DenseOp("linear", 20, 16, 64, gradient_bytes=second),
        DenseOp("relu", 20, 16),
    ]
    assert dense_ops([*_tower()], (20, 13)) == dense_ops(_tower(), (20, 13))


def test_a_transformer_by_hand() -> None:
    ops = dense_ops(_transformer(), (7, 3, 32))
    assert Counter(op.kind for op in ops) == {
        "linear": 8,
        "layer_norm": 4,
        "dropout": 6,
        "gelu": 2,
        "add": 4,
        "attention_dropout": 2,
    }
    attention = next(op for op in ops if op.kind == "attention_dropout")
    assert (attention.rows, attention.width, attention.inner) == (3 * 4, 7, 8)
    # Of the first residual only one way has a gradient.
    assert [op.input_gradient for op in ops if op.kind == "add"] == [False, True, True, True]
    without = dense_ops(_transformer(dropout=0.0), (7, 3, 32))
    assert Counter(op.kind for op in without)["attention"] == 2
    assert not Counter(op.kind for op in without)["dropout"]


def test_frozen_layers_have_no_gradients() -> None:
    frozen = nn.Linear(4, 8).requires_grad_(False)
    ops = dense_ops([nn.Dropout(0.1), frozen, nn.Linear(8, 2)], (5, 4))
    assert [op.input_gradient for op in ops] == [False] * 3
    assert [op.gradient_bytes for op in ops] == [(), (), (64, 8)]


@pytest.mark.parametrize(
    ("layers", "shape", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (2, 4), "layer '1' is a Tanh: known are"),
        (nn.Linear(4, 4), (2, 5), "takes 4 columns, its input is"),
        (nn.LayerNorm((3, 4)), (2, 3, 4), r"LayerNorm of \(3, 4\)"),
        (_transformer(), (7, 32), "layer 'layers.0' is a TransformerEncoderLayer: its input is"),
        (nn.Linear(4, 4), (4,), "give all sizes"),
        (nn.TransformerEncoderLayer(4, 2, activation=torch.tanh), (2, 2, 4), "activation is no"),
    ],
)
def test_layers_that_are_not_known(layers: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense_ops(layers, shape)
