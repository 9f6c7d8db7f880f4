"""Times dense ops of torch on one core, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchrec_bls.sharding.calibration.lookups import on_one_core
from tqdm import tqdm

from benchmarks.simulator.dense.fit import dense_samples, fit_dense
from benchmarks.simulator.dense.model import DenseModel
from benchmarks.simulator.dense.ops import ATTENTION, ELEMENTWISE, OF_GRADIENTS, DenseOp

_WIDTHS = (1, 13, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Larger than the caches.
_MOST_ROWS, _MOST_ELEMENTS, _MOST_PRODUCTS = 8192, 2**23, 2**28
_DROPOUT = 0.1
# Parameters that an optimizer updates in one step, since every step has a constant cost as well.
_PARAMETERS = 8
_HEADS = 4
_BEGINNINGS, _LEAST_US = 5, 0.1

# Ops of each kind, and how many of all are measured in turn; rounds of these, and how often
# everything is measured: a machine that others share has slow moments.
_EACH, _TOGETHER, _ROUNDS, _VISITS = 10, 24, 5, 3


def measured_model(cache_bytes: Sequence[float]) -> DenseModel:
    """Measures ops of all kinds on one core, and fits their models.

    Args:
        cache_bytes: sizes of caches; an op that touches more bytes takes longer.
    """
    ops = draw_dense(_EACH, seed=1)
    times: list[dict[str, list[float]]] = [{} for _ in ops]
    starts = range(0, len(ops), _TOGETHER)
    with on_one_core():
        for _, first in tqdm([*product(range(_VISITS), starts)], desc="dense ops"):
            group = slice(first, first + _TOGETHER)
            for its_times, more in zip(
                times[group], measure_dense(ops[group], _ROUNDS), strict=True
            ):
                for name, us in more.items():
                    its_times.setdefault(name, []).extend(us)
    return fit_dense(dense_samples(ops, times), cache_bytes)


def draw_dense(each: int, *, seed: int) -> list[DenseOp]:
    """Draws ops of all kinds. The first ones already include each kind.

    Args:
        each: number of ops of each kind.
        seed: seed, not negative.
    """
    random = np.random.default_rng(seed)
    kinds = ("linear", *ELEMENTWISE, *ATTENTION, *OF_GRADIENTS)
    return [_draw(kind, random) for _ in range(each) for kind in kinds]


def _draw(kind: str, random: np.random.Generator) -> DenseOp:
    def size(low: float, high: float) -> int:
        return round(float(np.exp(random.uniform(np.log(low), np.log(high)))))

    if kind in OF_GRADIENTS:
        return DenseOp(kind, 1, size(16, _MOST_ELEMENTS))
    if kind in ATTENTION:
        inner, width = int(random.choice([16, 32, 64])), size(8, 256)
        most = min(64, _MOST_ELEMENTS // (_HEADS * width * max(width, inner)))
        return DenseOp(kind, _HEADS * size(1, most), width, inner)
    rows = size(16, _MOST_ROWS)
    if kind != "linear":
        width = int(random.choice(_WIDTHS[2:]))
        return DenseOp(kind, min(rows, _MOST_ELEMENTS // width), width)
    width = int(random.choice(_WIDTHS))
    rows = min(rows, _MOST_ELEMENTS // width)
    inner = int(random.choice(_WIDTHS))
    rows = min(rows, max(_MOST_PRODUCTS // (width * inner), 16), _MOST_ELEMENTS // inner)
    return DenseOp(kind, rows, width, inner, input_gradient=bool(random.random() < 0.7))


def measure_dense(ops: Sequence[DenseOp], rounds: int) -> list[dict[str, list[float]]]:
    """Times ops in turn, on one thread.

    In a training step an op finds two things in the caches: its input, which the op before it has
    just written, and its code, which earlier layers ran. So before each timed call a tiny op of its
    kind runs and the input is read. The other ops between two calls drive out everything else.
    Times are the thread's own, without what other processes take. A backward takes some time even
    if it has nothing to do. That time is taken off, since a step begins one backward, not one for
    each op.

    Args:
        ops: ops to run; their tensors are in memory together.
        rounds: number of times that each op is timed.

    Returns:
        For each op its `forward_us`, and its `backward_us` if it has a backward, each with one
        number a round.
    """
    torch.set_num_threads(1)
    timed = [_timed(op) for op in ops]
    tiny = {op.kind: _timed(replace(op, rows=_HEADS, width=2, inner=2)) for op in ops}
    nothing = _Layer(lambda x: x.view_as(x), _input(16, 1))
    times: list[dict[str, list[float]]] = [{} for _ in ops]
    for _ in range(rounds):
        begun = min(nothing.times()["backward_us"] for _ in range(_BEGINNINGS))
        for op, work, its_times in zip(ops, timed, times, strict=True):
            tiny[op.kind].times()
            for name, us in work.times().items():
                alone = us - begun if name == "backward_us" else us
                its_times.setdefault(name, []).append(round(max(alone, _LEAST_US), 2))
    return times


class _Layer:
    """A layer with its input, timed forward and backward."""

    def __init__(
        self,
        layer: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
        source: Tensor,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self._layer, self._source = layer, source
        self._wanted = [each for each in (source, *parameters) if each.requires_grad]
        output = layer(source)
        outputs = output if isinstance(output, tuple) else (output,)
        self._gradients = [torch.full_like(each, 1e-3) for each in outputs]

    def times(self) -> dict[str, float]:
        """Calls the op once, and returns its times in microseconds."""
        self._source.sum()
        forward, output = _us(partial(self._layer, self._source))
        self._gradients[0].sum()
        backward, _ = _us(partial(torch.autograd.grad, output, self._wanted, self._gradients))
        return {"forward_us": forward, "backward_us": backward}


class _Copy:
    """The copy of a parameter's gradient into a bucket, or back."""

    def __init__(self, kind: str, elements: int) -> None:
        gradient, bucket = torch.ones(elements), torch.ones(elements)
        self._read = gradient if kind == "pack" else bucket
        self._call: Callable[[], object] = partial(gradient.copy_, bucket)
        if kind == "pack":
            self._call = partial(torch.mul, gradient, 0.5, out=bucket)

    def times(self) -> dict[str, float]:
        """Calls the op once, and returns its times in microseconds."""
        self._read.sum()
        return {"forward_us": _us(self._call)[0]}


class _Update:
    """An optimizer's step, and a parameter's share of it."""

    def __init__(self, elements: int) -> None:
        count = min(_PARAMETERS, max(_MOST_ELEMENTS // elements, 1))
        self._parameters = [nn.Parameter(torch.zeros(elements)) for _ in range(count)]
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-3)

    def times(self) -> dict[str, float]:
        """Calls the op once, and returns its times in microseconds."""
        for parameter in self._parameters:
            parameter.grad = torch.ones_like(parameter)
        return {"forward_us": _us(self._step)[0] / len(self._parameters)}

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def _us(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time_ns()
    result = call()
    return (time.thread_time_ns() - start) / 1e3, result


def _input(*shape: int, gradient: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=gradient)


def _timed(op: DenseOp) -> _Layer | _Copy | _Update:
    if op.kind in OF_GRADIENTS:
        return _Update(op.width) if op.kind == "update" else _Copy(op.kind, op.width)
    if op.kind in ATTENTION:
        packed = _input(op.width, op.rows // _HEADS, 3 * _HEADS * op.inner)
        dropout = _DROPOUT if op.kind == "attention_dropout" else 0.0
        return _Layer(partial(_attention, dropout=dropout), packed)
    if op.kind == "linear":
        linear = nn.Linear(op.inner, op.width)
        source = _input(op.rows, op.inner, gradient=op.input_gradient)
        return _Layer(linear, source, linear.parameters())
    source = _input(op.rows, op.width)
    match op.kind:
        case "layer_norm":
            norm = nn.LayerNorm(op.width)
            return _Layer(norm, source, norm.parameters())
        case "add":
            return _Layer(partial(_residual, other=torch.ones_like(source)), source)
        case "concat":
            left, right = _input(op.rows, op.width // 2), _input(op.rows, op.width // 2)
            return _Layer(lambda x: torch.cat([x, right], dim=1), left, [right])
    layers = {"relu": nn.ReLU(), "gelu": nn.GELU(), "dropout": nn.Dropout(_DROPOUT)}
    return _Layer(layers[op.kind], source)


def _residual(source: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a sum with something else, after which `source` gets two gradients."""
    used = source.view_as(source)
    return used + other, used


def _attention(packed: Tensor, dropout: float) -> Tensor:
    """What nn.MultiheadAttention does between its two linear layers, with (length, batch, ...)."""
    length, batch, columns = packed.shape
    parts = packed.view(length, batch, 3, columns // 3).unsqueeze(0).transpose(0, -2).squeeze(-2)
    query, key, value = (
        part.view(length, batch * _HEADS, -1).transpose(0, 1).view(batch, _HEADS, length, -1)
        for part in parts.contiguous()
    )
    mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    return mixed.permute(2, 0, 1, 3).reshape(batch * length, columns // 3)
