"""Bounds of the error of embeddings, and how they shrink while a model is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchrec_bls._deprecated import with_old_names

#: That the quantizer can keep (csrc/codecs/bounded).
LEAST_BOUND, MOST_BOUND = 2.0**-126, 2.0**110


def _stepwise(decay: Decay, progress: float) -> float:
    return math.floor(progress * decay.steps) / decay.steps


def _linear(decay: Decay, progress: float) -> float:
    return progress


def _logarithmic(decay: Decay, progress: float) -> float:
    return math.log1p(progress * decay.iterations) / math.log1p(decay.iterations)


# Part of the way from `start` to 1 that is done after a share of the iterations.
_KINDS: dict[str, Callable[[Decay, float], float]] = {
    "stepwise": _stepwise,
    "linear": _linear,
    "logarithmic": _logarithmic,
}


@with_old_names
@dataclass(frozen=True)
class Decay:
    """A decay of bounds at the start of a training.

    This is the iteration-wise adjustment of Dual-Level Adaptive Lossy Compression, section III-C.
    The paper multiplies its factors from one iteration to the next, by which bounds would vanish.
    Here a factor belongs to its iteration alone.

    Attributes:
        start: factor of the bounds at the first iteration, above 1.
        iterations: length of the decay; from there on the factor is 1.
        steps: number of steps of a stepwise decay, equal in length and height.
        kind: "stepwise", "linear", or "logarithmic": as the logarithm of the iteration, steep at
            first.
    """

    start: float
    iterations: int
    steps: int = 4
    kind: str = "stepwise"

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that describe no decay."""
        if not (_is_number(self.start) and 1 < self.start < math.inf):
            raise ValueError(
                f"decay starts at {self.start!r} times the bound, but must start above 1 time"
            )
        for name, value in (("iterations", self.iterations), ("steps", self.steps)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"decay has {value!r} {name}, but needs a positive number")
        if self.kind not in _KINDS:
            raise ValueError(f"decay is {self.kind!r}, but must be one of {', '.join(_KINDS)}")


@with_old_names
@dataclass(frozen=True)
class ErrorBound:
    """A codec whose values differ by at most a bound from the values sent.

    Values are rounded to a grid. Equal rows travel once, and the others as a prefix code. Rows with
    NaN, infinities or values too large for the grid travel bit for bit.

    Attributes:
        bound: absolute bound of every value of a forward's embeddings. Partial sums of one sum
            share it.
        decay: decay of the bound in a training; None: it stays.
        fixed_width: whether all codes have as many bits. That is faster than the shortest form, and
            takes more bytes. Only the sender chooses: the same values arrive.
    """

    bound: float
    decay: Decay | None = None
    fixed_width: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible bound."""
        if not (_is_number(self.bound) and LEAST_BOUND <= self.bound <= MOST_BOUND):
            raise ValueError(
                f"the error bound is {self.bound!r}, but must be from {LEAST_BOUND:.3g} to "
                f"{MOST_BOUND:.3g}: 0.01 suits embeddings of about 1, and fp32 has no error"
            )
        if self.decay is not None and bound_at(self, 0) > MOST_BOUND:
            raise ValueError(
                f"the error bound {self.bound!r} starts at {self.decay.start} times that, above "
                f"{MOST_BOUND:.3g}: lower one of the two"
            )


def factor_at(decay: Decay, iteration: int) -> float:
    """Returns the factor of the bounds at `iteration`, counted from 0."""
    if iteration >= decay.iterations:
        return 1.0
    behind = _KINDS[decay.kind](decay, iteration / decay.iterations)
    return decay.start + (1 - decay.start) * behind


def bound_at(codec: ErrorBound, iteration: int, addends: int = 1) -> float:
    """Returns the bound at an iteration: a float32 that is not above it.

    Args:
        codec: bound, with its decay.
        iteration: iteration of the training, counted from 0.
        addends: number of values that the receiver adds up, which share the bound.
    """
    factor = 1.0 if codec.decay is None else factor_at(codec.decay, iteration)
    exact = codec.bound * factor / addends
    nearest = np.float32(exact)
    return float(nearest if float(nearest) <= exact else np.nextafter(nearest, np.float32(0)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
