"""The time of a collective as a function of its message size.

There are two curves. Alpha-beta: a start-up time and a time for each byte. The sigmoid of the
performance paper (sec. IV-A): up to m1 bytes the time is constant, from m2 on linear, and between
them it is m / bandwidth(m), where the logarithm of the bandwidth is a sigmoid of that of the size:

    t(m) = t_s                       m <= m1
           m / 10 ** s(log2 m)       m1 < m < m2,    s(x) = L / (1 + exp(-k (x - x0))) + b
           t_s + m / BW              m >= m2

The paper's eight parameters leave steps at m1 and m2. Here L and b follow from the other six, so
that the curve is continuous. (Eq. 6 prints log2(m) / 10 ** s; the authors' code divides m.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, structs

from torchrec_bls.records import AboveZero, Amount, Ranks, Record

from ..cost_interface import Estimate

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AlphaBeta:
    """start_us + bytes * us_per_byte."""

    start_us: float
    us_per_byte: float

    def microseconds(self, message_bytes: Floats) -> Floats:
        """The time of each size, same shape."""
        times: Floats = self.start_us + np.asarray(message_bytes, np.float64) * self.us_per_byte
        return times


@dataclass(frozen=True)
class Sigmoid:
    """The paper's curve, continuous.

    Attributes:
        start_us: t_s.
        us_per_byte: 1 / BW.
        constant_below_bytes: m1.
        linear_above_bytes: m2.
        centre_log2: x0.
        steepness: k.
    """

    start_us: float
    us_per_byte: float
    constant_below_bytes: float
    linear_above_bytes: float
    centre_log2: float
    steepness: float

    def microseconds(self, message_bytes: Floats) -> Floats:
        """The time of each size, same shape."""
        size = np.asarray(message_bytes, np.float64)
        low, high = self.constant_below_bytes, self.linear_above_bytes
        # log10 of the bandwidth where the other two pieces begin.
        at_low = np.log10(low / self.start_us)
        at_high = np.log10(high / (self.start_us + high * self.us_per_byte))
        rise_low, rise_high = self._rise(np.log2(low)), self._rise(np.log2(high))
        inside = np.log2(np.clip(size, low, high))
        progress = (self._rise(inside) - rise_low) / (rise_high - rise_low)
        between = np.clip(size, low, high) / 10 ** (at_low + (at_high - at_low) * progress)
        times: Floats = np.where(
            size <= low,
            self.start_us,
            np.where(size >= high, self.start_us + size * self.us_per_byte, between),
        )
        return times

    def _rise(self, log2_bytes: Any) -> Any:
        return 1.0 / (1.0 + np.exp(-self.steepness * (log2_bytes - self.centre_log2)))


_CURVES: dict[str, type[AlphaBeta] | type[Sigmoid]] = {
    "alpha_beta": AlphaBeta,
    "sigmoid": Sigmoid,
}


@dataclass(frozen=True)
class CollectiveModel:
    """One collective on one backend among a number of ranks.

    Attributes:
        operation: "all_to_all" or "all_reduce".
        backend: "gloo", "bls" or "tcp" (`Profile`).
        world_size: ranks.
        curve: message bytes to microseconds.
        imbalance: weight of differences between the ranks' bytes, 0 to 1 (`message_bytes`).
        interval_log: two logarithms; 9 of 10 measurements with equal sizes lie between the
            prediction times exp of the first and times exp of the second.
        uneven_interval_log: the same where the ranks' sizes differ.
        calibrated_bytes: smallest and largest message that was measured.
        held_out_gmae_percent: error on messages with equal sizes that nothing was fitted to.
        uneven_held_out_gmae_percent: the same where the ranks' sizes differ.
        work: time, by message bytes, that a rank's threads work on cores meanwhile. None means all
            of the time: it was not measured, or ranks that wait spin.
    """

    operation: str
    backend: str
    world_size: int
    curve: AlphaBeta | Sigmoid
    imbalance: float
    interval_log: tuple[float, float]
    uneven_interval_log: tuple[float, float]
    calibrated_bytes: tuple[float, float]
    held_out_gmae_percent: float
    uneven_held_out_gmae_percent: float
    work: AlphaBeta | None = None

    def estimate(self, message_bytes: float, *, even: bool = True) -> Estimate:
        """The time for a message size.

        Beyond the largest measured message the interval gets wider: by the factor 1 + d for d
        doublings.
        """
        time = float(self.curve.microseconds(np.asarray([message_bytes]))[0])
        outside = max(0.0, float(np.log2(max(message_bytes, 1.0) / self.calibrated_bytes[1])))
        logs = self.interval_log if even else self.uneven_interval_log
        low, high = (time * float(np.exp(log * (1.0 + outside))) for log in logs)
        on_core = 1.0
        if self.work is not None:
            on_core = min(float(self.work.microseconds(np.asarray([message_bytes]))[0]) / time, 1.0)
        return Estimate(time, low, high, on_core)

    def as_json(self) -> dict[str, Any]:
        """Returns an object for the profile."""
        kind = next(name for name, curve in _CURVES.items() if isinstance(self.curve, curve))
        record = {**asdict(self), "curve": {"kind": kind, **asdict(self.curve)}}
        if self.work is None:
            del record["work"]
        return record


class _AlphaBetaRecord(Record, tag_field="kind", tag="alpha_beta"):
    start_us: AboveZero
    us_per_byte: AboveZero

    def curve(self) -> AlphaBeta:
        return AlphaBeta(**structs.asdict(self))


class _SigmoidRecord(Record, tag_field="kind", tag="sigmoid"):
    start_us: AboveZero
    us_per_byte: AboveZero
    constant_below_bytes: AboveZero
    linear_above_bytes: AboveZero
    centre_log2: float
    steepness: AboveZero

    def __post_init__(self) -> None:
        low, high = np.log2([self.constant_below_bytes, self.linear_above_bytes])
        if not low <= self.centre_log2 <= high or low == high:
            raise ValueError(
                f"the pieces of the curve don't follow each other: it is constant up to 2 ** {low},"
                f" linear from 2 ** {high} on, and its centre is 2 ** {self.centre_log2}"
            )

    def curve(self) -> Sigmoid:
        return Sigmoid(**structs.asdict(self))


class _WorkRecord(Record):
    start_us: Amount
    us_per_byte: Amount


_INTERVALS = ("interval_log", "uneven_interval_log", "calibrated_bytes")


class CollectiveRecord(Record):
    """A CollectiveModel in a profile."""

    operation: Literal["all_to_all", "all_reduce"]
    backend: str
    world_size: Ranks
    curve: _AlphaBetaRecord | _SigmoidRecord
    imbalance: Annotated[float, Meta(ge=0, le=1)]
    interval_log: tuple[float, float]
    uneven_interval_log: tuple[float, float]
    calibrated_bytes: tuple[AboveZero, AboveZero]
    held_out_gmae_percent: Amount
    uneven_held_out_gmae_percent: Amount
    work: _WorkRecord | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an interval that ends before it begins."""
        for name in _INTERVALS:
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} is {[low, high]}, but must ascend")

    def model(self) -> CollectiveModel:
        """Returns the content."""
        work = None if self.work is None else AlphaBeta(**structs.asdict(self.work))
        return CollectiveModel(
            **{**structs.asdict(self), "curve": self.curve.curve(), "work": work}
        )


def message_bytes(sent_bytes: Any, received_bytes: Any, imbalance: float) -> float:
    """Returns the size of an even all-to-all that takes as long as this uneven one.

    The paper's rule (sec. IV-A) is "the maximum of (the maximum of sent/received message size per
    device) across all devices". It is right if each rank has a core and a link of its own. If ranks
    share cores or links, the bytes of all ranks count. The size returned is between the two:

        mean * (largest / mean) ** imbalance

    The mean is over ranks. An exponent of 1 is the paper's rule; calibration finds the exponent.

    Args:
        sent_bytes: (world_size,) total of each rank.
        received_bytes: (world_size,) total of each rank.
        imbalance: the exponent, 0 to 1.
    """
    mean = float(np.mean(sent_bytes))
    largest = float(max(np.max(sent_bytes), np.max(received_bytes)))
    return mean * (largest / mean) ** imbalance if mean > 0 else largest
