"""Times of dense ops on one core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrec_bls.records import AboveZero, Amount, Record

from ...cost_interface import Gradient, LayerTimes
from .ops import OF_GRADIENTS, TERMS, WORD_BYTES, DenseOp, terms

Floats = npt.NDArray[np.float64]


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
            ValueError: no such op was calibrated.
        """
        if (kind, direction) not in self.kinds:
            raise ValueError(
                f"the profile has no {direction} of dense ops of kind '{kind}': calibrate again"
            )
        times: Floats = terms(kind, direction, ops, self.cache_bytes) @ (
            self.kinds[kind, direction].coefficients_us
        )
        return times

    def layer_times(self, ops: Iterable[DenseOp]) -> list[LayerTimes]:
        """Returns what each op adds to a data-parallel training step.

        Args:
            ops: ops in the order of the forward, as `dense_ops` returns them.

        Raises:
            ValueError: a kind was not calibrated.
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

    def as_json(self) -> dict[str, Any]:
        """Returns an object for the profile."""
        kinds: dict[str, dict[str, Any]] = {}
        for (kind, direction), model in self.kinds.items():
            names = [*TERMS[kind], *_names_beyond(self.cache_bytes)]
            kinds.setdefault(kind, {})[direction] = {
                "coefficients_us": dict(zip(names, model.coefficients_us.tolist(), strict=True)),
                "held_out_gmae_percent": model.held_out_gmae_percent,
            }
        return {"cache_bytes": list(self.cache_bytes), "kinds": kinds}


class _DenseOpRecord(Record):
    coefficients_us: dict[str, Amount]
    held_out_gmae_percent: Amount


class DenseRecord(Record):
    """A DenseModel in a profile."""

    cache_bytes: list[AboveZero]
    kinds: dict[str, dict[Literal["forward", "backward"], _DenseOpRecord]]

    def __post_init__(self) -> None:
        """Raises ValueError for other kinds or coefficients."""
        for kind, directions in self.kinds.items():
            if kind not in TERMS:
                raise ValueError(f"dense ops are of kind {kind!r}, but must be of {list(TERMS)}")
            for direction, op in directions.items():
                names = self._coefficients(kind)
                if op.coefficients_us.keys() != set(names):
                    raise ValueError(
                        f"coefficients of the {direction} of {kind} are "
                        f"{sorted(op.coefficients_us)}, expected {names}"
                    )

    def _coefficients(self, kind: str) -> list[str]:
        return [*TERMS[kind], *_names_beyond(self.cache_bytes)]

    def model(self) -> DenseModel:
        """Returns the content."""
        return DenseModel(
            tuple(self.cache_bytes),
            {
                (kind, direction): DenseOpModel(
                    np.array([op.coefficients_us[name] for name in self._coefficients(kind)]),
                    op.held_out_gmae_percent,
                )
                for kind, directions in self.kinds.items()
                for direction, op in directions.items()
            },
        )


def _names_beyond(cache_bytes: Sequence[float]) -> list[str]:
    return [f"bytes_beyond_{size:.0f}" for size in cache_bytes]
