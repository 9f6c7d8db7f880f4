"""Times of dense ops on one core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.simulator.dense.ops import OF_GRADIENTS, WORD_BYTES, DenseOp, terms

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gradient:
    """Times of a data-parallel step for the gradient of one parameter, microseconds on a core.

    Attributes:
        bytes: size of the gradient.
        pack_us: time of its copy into a bucket.
        unpack_us: time of the copy back.
        update_us: time that the optimizer takes for the parameter.
    """

    bytes: int
    pack_us: float
    unpack_us: float
    update_us: float


@dataclass(frozen=True)
class LayerTimes:
    """One op of a dense layer in a training step, microseconds on a core.

    Attributes:
        forward_us: time of its forward.
        backward_us: time of its backward.
        gradients: gradients of its parameters, in the order in which the layer has them.
    """

    forward_us: float
    backward_us: float
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class DenseOpModel:
    """One kind of op in one direction: a sum over `terms`.

    Attributes:
        coefficients_us: (columns of `terms`,) float64, not negative.
        held_out_gmae_percent: error on measured ops that nothing was fitted to.
    """

    coefficients_us: Floats
    held_out_gmae_percent: float


@dataclass(frozen=True)
class DenseModel:
    """The models of all kinds on one machine, as in the performance paper's section IV-D.

    Attributes:
        cache_bytes: sizes of caches; an op that touches more bytes takes longer.
        kinds: model by (kind, direction); ops of gradients have a forward only.
    """

    cache_bytes: tuple[float, ...]
    kinds: dict[tuple[str, str], DenseOpModel]

    def microseconds(self, kind: str, direction: str, ops: Sequence[DenseOp]) -> Floats:
        """Returns the time of each op, (len(ops),) float64.

        Args:
            kind: kind of all `ops`.
            direction: "forward" or "backward".
            ops: ops on one core.

        Raises:
            ValueError: no such op was measured.
        """
        if (kind, direction) not in self.kinds:
            raise ValueError(f"no {direction} of dense ops of kind '{kind}' was measured")
        times: Floats = terms(kind, direction, ops, self.cache_bytes) @ (
            self.kinds[kind, direction].coefficients_us
        )
        return times

    def layer_times(self, ops: Iterable[DenseOp]) -> list[LayerTimes]:
        """Returns what each op adds to a data-parallel training step.

        Args:
            ops: ops in the order of the forward, as `dense_ops` returns them.

        Raises:
            ValueError: a kind was not measured.
        """
        return [self._layer(op) for op in ops]

    def _layer(self, op: DenseOp) -> LayerTimes:
        has_backward = op.input_gradient or op.gradient_bytes
        return LayerTimes(
            forward_us=self._one(op, "forward"),
            backward_us=self._one(op, "backward") if has_backward else 0.0,
            gradients=tuple(self._gradient(size) for size in op.gradient_bytes),
        )

    def _gradient(self, size: int) -> Gradient:
        return Gradient(
            size,
            *(
                self._one(DenseOp(kind, 1, max(size // WORD_BYTES, 1)), "forward")
                for kind in OF_GRADIENTS
            ),
        )

    def _one(self, op: DenseOp, direction: str) -> float:
        return float(self.microseconds(op.kind, direction, [op])[0])
