"""Fits the curves of collectives by relative error, and keeps the curve that predicts better."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..collective_model import AlphaBeta, Sigmoid
from .accuracy import gmae_percent
from .least_squares import nonnegative_relative

Floats = npt.NDArray[np.float64]

_LEAST_POINTS = 4
_TINY = 1e-9
_MOST_ROUNDS = 60


def fit_alpha_beta(message_bytes: Floats, measured_us: Floats) -> AlphaBeta:
    """Fits alpha-beta by relative least squares.

    Args:
        message_bytes: (n,) float64, n >= 2 different sizes.
        measured_us: (n,) float64, positive.
    """
    matrix = np.stack([np.ones_like(message_bytes), message_bytes], axis=1)
    start, per_byte = nonnegative_relative(matrix, measured_us)
    return AlphaBeta(max(float(start), _TINY), max(float(per_byte), _TINY))


def fit_sigmoid(message_bytes: Floats, measured_us: Floats) -> Sigmoid:
    """Fits by least squares of the logarithm: a grid of boundaries and shapes, then a descent.

    Args:
        message_bytes: (n,) float64, n >= 4 different sizes.
        measured_us: (n,) float64, positive.
    """
    sizes = np.unique(message_bytes)
    if len(sizes) < _LEAST_POINTS:
        raise ValueError(f"{len(sizes)} message sizes; at least {_LEAST_POINTS} are needed")
    logs = np.log2(sizes)
    target = np.log(measured_us)

    def loss(parameters: Floats) -> float:
        curve = _sigmoid(parameters)
        if curve is None:
            return float("inf")
        return _huber(np.log(curve.microseconds(message_bytes)) - target)

    linear = fit_alpha_beta(message_bytes, measured_us)
    best, best_loss = None, float("inf")
    # The boundaries lie on measured sizes with at least one size on either side.
    thinned = logs[:: max(1, len(logs) // 10)]
    for low, high in itertools.combinations(thinned, 2):
        below = message_bytes <= 2**low
        above = message_bytes >= 2**high
        start = float(np.exp(np.median(target[below])))
        rest = np.maximum(measured_us[above] - start, 0.05 * measured_us[above])
        per_byte = float(np.exp(np.median(np.log(rest / message_bytes[above]))))
        for share, steepness in itertools.product((0.25, 0.5, 0.75), (0.2, 0.6)):
            for slope in (per_byte, linear.us_per_byte):
                guess = np.asarray(
                    [
                        np.log(start),
                        np.log(slope),
                        low,
                        high - low,
                        low + share * (high - low),
                        np.log(steepness),
                    ]
                )
                value = loss(guess)
                if value < best_loss:
                    best, best_loss = guess, value
    assert best is not None
    curve = _sigmoid(_descend(loss, best))
    assert curve is not None
    return curve


def choose_curve(
    message_bytes: Floats, measured_us: Floats, drawn: tuple[Floats, Floats] | None = None
) -> tuple[AlphaBeta | Sigmoid, Floats]:
    """Fits both curves. Keeps the sigmoid if it predicts held-out sizes better.

    The sizes are held out in turn, every fifth size at a time. Alpha-beta stays in two cases: the
    difference of the errors is at most its standard error, or the sigmoid is worse on drawn sizes.

    Args:
        message_bytes: (n,) float64.
        measured_us: (n,) float64, positive.
        drawn: bytes and microseconds of further messages, which neither curve is fitted to.

    Returns:
        The curve, fitted to all sizes, and (n,) log(measured / predicted) of held-out sizes.
    """
    order = np.argsort(message_bytes, kind="stable")
    straight = _held_out_errors(fit_alpha_beta, order, message_bytes, measured_us)
    line = fit_alpha_beta(message_bytes, measured_us)
    if len(np.unique(message_bytes)) >= 2 * _LEAST_POINTS:
        bent = _held_out_errors(fit_sigmoid, order, message_bytes, measured_us)
        sigmoid = fit_sigmoid(message_bytes, measured_us)
        if _is_larger(np.abs(straight) - np.abs(bent)) and not _loses(sigmoid, line, drawn):
            return sigmoid, bent
    return line, straight


def _loses(curve: Sigmoid, other: AlphaBeta, drawn: tuple[Floats, Floats] | None) -> bool:
    """Returns whether the curve's error on the drawn sizes, GMAE, is larger than the other's."""
    if drawn is None or not len(drawn[0]):
        return False
    sizes, measured = drawn
    errors = [gmae_percent(each.microseconds(sizes), measured) for each in (curve, other)]
    return errors[0] > errors[1]


def _held_out_errors(
    fit: Callable[[Floats, Floats], AlphaBeta | Sigmoid],
    order: npt.NDArray[np.int64],
    message_bytes: Floats,
    measured_us: Floats,
) -> Floats:
    errors = np.zeros(len(message_bytes))
    for fold in range(5):
        held_out = order[fold::5]
        others = np.setdiff1d(order, held_out)
        curve = fit(message_bytes[others], measured_us[others])
        predicted = curve.microseconds(message_bytes[held_out])
        errors[held_out] = np.log(measured_us[held_out] / predicted)
    return errors


def fit_imbalance(curve: AlphaBeta | Sigmoid, mean: Floats, largest: Floats, us: Floats) -> float:
    """Returns the exponent of `message_bytes` that fits uneven all-to-alls best, in tenths.

    1, the paper's rule, stays unless the difference of the errors is larger than twice its standard
    error.

    Args:
        curve: curve of even all-to-alls.
        mean: (n,) bytes of a rank on average.
        largest: (n,) bytes of the rank that sends or receives most.
        us: (n,) microseconds.
    """
    exponents = np.linspace(0.0, 1.0, 11)
    errors = np.stack([np.abs(np.log(us / uneven_us(curve, mean, largest, e))) for e in exponents])
    best = int(errors.sum(axis=1).argmin())
    # One standard error is what the best of eleven gains by chance.
    gain = errors[-1] - errors[best]
    return round(float(exponents[best]), 1) if _is_larger(gain, standard_errors=2) else 1.0


def uneven_us(
    curve: AlphaBeta | Sigmoid, mean: Floats, largest: Floats, imbalance: float
) -> Floats:
    """Returns the time of uneven all-to-alls, (n,) microseconds; arguments as `fit_imbalance`."""
    return curve.microseconds(mean * (largest / mean) ** imbalance)


def held_out_uneven_us(
    curve: AlphaBeta | Sigmoid, mean: Floats, largest: Floats, us: Floats
) -> Floats:
    """Predicts each uneven all-to-all with the exponent that is fitted to all others.

    Arguments as `fit_imbalance`.

    Returns:
        (n,) microseconds.
    """
    predicted = np.zeros_like(us)
    for tested in np.eye(len(us), dtype=bool):
        others = ~tested
        exponent = fit_imbalance(curve, mean[others], largest[others], us[others])
        predicted[tested] = uneven_us(curve, mean[tested], largest[tested], exponent)
    return predicted


def _is_larger(gain: Floats, standard_errors: int = 1) -> bool:
    """Returns whether the mean is above 0 by more than so many of its standard errors."""
    return len(gain) > 1 and bool(gain.mean() > standard_errors * gain.std() / np.sqrt(len(gain)))


def _sigmoid(parameters: Floats) -> Sigmoid | None:
    start, slope, low, width, centre, steepness = parameters
    # A flatter sigmoid is nearly a straight line, a steeper one nearly a step.
    shaped = -3.0 < steepness < 1.5 and low <= centre <= low + width
    if not (shaped and 0.05 < width < 60 and low > 0):
        return None
    return Sigmoid(
        start_us=float(np.exp(start)),
        us_per_byte=float(np.exp(slope)),
        constant_below_bytes=float(2**low),
        linear_above_bytes=float(2 ** (low + width)),
        centre_log2=float(centre),
        steepness=float(np.exp(steepness)),
    )


def _huber(error: Floats) -> float:
    size = np.abs(error)
    limit = 0.3
    return float(np.where(size <= limit, size**2, limit * (2 * size - limit)).sum())


def _descend(loss: Callable[[Floats], float], start: Floats) -> Floats:
    """Tries a step along each parameter in turn and halves the steps that don't help."""
    here, value = start.copy(), loss(start)
    steps = np.asarray([0.3, 0.3, 1.0, 1.0, 1.0, 0.5])
    for _ in range(_MOST_ROUNDS):
        for i in range(len(here)):
            for sign in (1.0, -1.0):
                moved = here.copy()
                moved[i] += sign * steps[i]
                moved_value = loss(moved)
                if moved_value < value:
                    here, value = moved, moved_value
                    steps[i] *= 1.5
                    break
            else:
                steps[i] *= 0.5
        if steps.max() < 1e-4:
            break
    result: Floats = here
    return result
