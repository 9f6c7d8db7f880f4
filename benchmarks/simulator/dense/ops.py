"""Ops of dense layers, and the terms that add up to the time of each op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WORD_BYTES = 4

ELEMENTWISE = ("relu", "gelu", "dropout", "add", "concat", "layer_norm")
ATTENTION = ("attention", "attention_dropout")
#: Have both directions.
LAYERS = ("linear", *ELEMENTWISE, *ATTENTION)
#: What a data-parallel step does with a parameter's gradient: copies it into its bucket, divided by
#: the ranks; copies it back; updates the parameter by it (SGD).
OF_GRADIENTS = ("pack", "unpack", "update")

#: Names of the columns of `terms`, but for those of memory beyond a cache.
TERMS: dict[str, tuple[str, ...]] = {
    "linear": (
        "op",
        "multiplications",
        "of_input_gradient",
        "input_elements",
        "weights",
        "output_elements",
    ),
    **dict.fromkeys(ATTENTION, ("op", "multiplications", "scores", "elements")),
    **dict.fromkeys(ELEMENTWISE, ("op", "elements", "rows")),
    **dict.fromkeys(OF_GRADIENTS, ("op", "elements")),
}


@dataclass(frozen=True)
class DenseOp:
    """An op on float32 numbers.

    Attributes:
        kind: one of `LAYERS` or `OF_GRADIENTS`.
        rows: rows of the output; for attention, sequences x heads; for a parameter's gradient, 1.
        width: columns of the output; for attention, the length of a sequence.
        inner: columns of a linear layer's input; for attention, columns of a head.
        input_gradient: whether the backward has to find the input's gradient.
        gradient_bytes: bytes of each parameter's gradient, in the layer's order.
    """

    kind: str
    rows: int
    width: int
    inner: int = 1
    input_gradient: bool = True
    gradient_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible op."""
        if self.kind not in TERMS:
            raise ValueError(f"a dense op of kind {self.kind!r}; known are {sorted(TERMS)}")
        if min(self.rows, self.width, self.inner) < 1:
            raise ValueError(f"sizes of a dense op have to be positive: {self}")


def terms(
    kind: str, direction: str, ops: Sequence[DenseOp], cache_bytes: Sequence[float]
) -> Floats:
    """Returns the terms that the time of each op is a sum of.

    Args:
        kind: kind of all `ops`.
        direction: "forward" or "backward".
        ops: the n ops.
        cache_bytes: size of each cache; a further column says by how much an op touches more.

    Returns:
        (n, len(TERMS[kind]) + len(cache_bytes)) float64.
    """
    rows, width, inner, gradient = np.array(
        [(op.rows, op.width, op.inner, op.input_gradient) for op in ops], np.float64
    ).T
    ones, elements = np.ones_like(rows), rows * width
    if kind == "linear":
        products = elements * inner
        of_gradient = products * gradient * (direction == "backward")
        sizes = (rows * inner, inner * width, elements)
        columns, touched = [ones, products, of_gradient, *sizes], sum(sizes)
    elif kind in ATTENTION:
        scores, each = elements * width, elements * inner
        columns = [ones, scores * inner, scores, each]
        # The fused kernel, which has no dropout, does not keep the scores.
        touched = 4 * each + (scores if kind == "attention_dropout" else 0.0)
    else:
        columns, touched = [ones, elements, rows][: len(TERMS[kind])], 2 * elements
    beyond = [np.maximum(WORD_BYTES * touched - size, 0.0) for size in cache_bytes]
    stacked: Floats = np.stack([*columns, *beyond], axis=1)
    return stacked
