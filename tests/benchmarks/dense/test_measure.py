"""Dense ops as they are drawn and run; nothing here looks at how long they took."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.simulator.dense import measure
from benchmarks.simulator.dense.measure import draw_dense, measure_dense, measured_model
from benchmarks.simulator.dense.ops import LAYERS, OF_GRADIENTS, DenseOp


def test_a_longer_list_begins_with_the_shorter_and_has_all_kinds() -> None:
    drawn = draw_dense(10, seed=1)
    assert drawn[:36] == draw_dense(3, seed=1)
    assert drawn != draw_dense(10, seed=2)
    assert Counter(op.kind for op in drawn) == dict.fromkeys((*LAYERS, *OF_GRADIENTS), 10)
    assert {op.input_gradient for op in drawn if op.kind == "linear"} == {True, False}
    assert max(op.rows * op.width for op in drawn) <= measure._MOST_ELEMENTS


@pytest.mark.full
def test_every_kind_is_measured_in_its_directions() -> None:
    small = [DenseOp(kind, 8, 16, 4) for kind in (*LAYERS, *OF_GRADIENTS)]
    times = measure_dense(small, rounds=2)
    for op, measured in zip(small, times, strict=True):
        directions = {"forward_us", "backward_us"} if op.kind in LAYERS else {"forward_us"}
        assert measured.keys() == directions
        assert all(len(each) == 2 and min(each) > 0 for each in measured.values())


def test_attention_is_what_multihead_attention_does_between_its_linear_layers() -> None:
    columns = 8 * measure._HEADS
    reference = nn.MultiheadAttention(columns, measure._HEADS, bias=False)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.eye(columns).repeat(3, 1))
        reference.out_proj.weight.copy_(torch.eye(columns))
    source = torch.randn(5, 3, columns)
    expected, _ = reference(source, source, source, need_weights=False)
    found = measure._attention(torch.cat([source] * 3, dim=-1), dropout=0.0)
    torch.testing.assert_close(found.view(5, 3, columns), expected)


def test_the_backward_of_a_sum_adds_gradients_up() -> None:
    source = torch.randn(4, requires_grad=True)
    outputs = measure._residual(source, torch.ones(4))
    (gradient,) = torch.autograd.grad(outputs, [source], [torch.ones(4), torch.full((4,), 2.0)])
    assert gradient.tolist() == [3.0] * 4


@pytest.mark.full
def test_all_kinds_are_measured_and_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MOST_PRODUCTS", 2**12)
    monkeypatch.setattr(measure, "_MOST_ELEMENTS", 2**18)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    backwards = {(kind, "backward") for kind in LAYERS}
    assert measured_model([1e6]).kinds.keys() == backwards | {
        (kind, "forward") for kind in (*LAYERS, *OF_GRADIENTS)
    }
