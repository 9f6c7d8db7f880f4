"""Delays of ranks: how much longer than usual each rank takes in each step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from torchrec_bls.records import Amount, Format, Record

from .engine.task_graph import Floats

_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
_OF_A_FILE = 'a file of JSON: {"milliseconds": [3.1, 0.2, ...]}, drawn from with replacement'
Draw = Callable[[np.random.Generator, int, int], Floats]


class DelayError(ValueError):
    """A text does not describe delays."""


@dataclass(frozen=True)
class Delays:
    """A distribution of delays.

    Attributes:
        text: the text that it was read from.
        draw: function that returns (ranks, steps) microseconds.
    """

    text: str
    draw: Draw

    def sample(self, ranks: int, steps: int, seed: int) -> Floats:
        """Returns (ranks, steps) microseconds. The same arguments give the same numbers.

        Raises:
            DelayError: the delays are for another number of ranks.
        """
        return self.draw(np.random.default_rng(seed), ranks, steps)


def read_delays(text: str) -> Delays:
    """Reads delays as command lines give them.

    Raises:
        DelayError: the text describes no delays; the message lists what does.
        OSError: a file can't be read.
    """
    kind, _, rest = text.partition(":")
    if kind in _KINDS:
        form, read = _KINDS[kind]
        try:
            return Delays(text, read(rest))
        except DelayError as error:
            raise DelayError(f"delays '{text}': {error}: give {form}") from error
    if text.endswith(".json"):
        return Delays(text, _from_file(Path(text)))
    forms = "; ".join(form for form, _ in _KINDS.values())
    raise DelayError(f"delays '{text}' are none of: {forms}; {_OF_A_FILE}")


def _none(rest: str) -> Draw:
    if rest:
        raise DelayError("'none' takes nothing")
    return lambda _, ranks, steps: np.zeros((ranks, steps))


def _constant(rest: str) -> Draw:
    each = _time(rest)
    return lambda _, ranks, steps: np.full((ranks, steps), each)


def _uniform(rest: str) -> Draw:
    low_text, dash, high_text = rest.partition("-")
    if not dash:
        raise DelayError("a range has two ends")
    high = _time(high_text)
    # "0-10ms": the beginning has the unit of the end, unless it has its own.
    low = _time(low_text if _unit(low_text) else low_text + _unit(high_text))
    if low > high:
        raise DelayError("a range has its lower end first")
    return lambda random, ranks, steps: random.uniform(low, high, (ranks, steps))


def _exponential(rest: str) -> Draw:
    mean = _time(rest)
    return lambda random, ranks, steps: mean * random.standard_exponential((ranks, steps))


def _lognormal(rest: str) -> Draw:
    median_text, deviation_text = _parts(rest, 2)
    median, deviation = _time(median_text), _number(deviation_text)
    if median == 0:
        raise DelayError("the median must be positive")

    def draw(random: np.random.Generator, ranks: int, steps: int) -> Floats:
        return median * np.exp(deviation * random.standard_normal((ranks, steps)))

    return draw


def _spikes(rest: str) -> Draw:
    share_text, time_text = _parts(rest, 2)
    share, each = _share(share_text), _time(time_text)
    return lambda random, ranks, steps: np.where(random.random((ranks, steps)) < share, each, 0.0)


def _bursts(rest: str) -> Draw:
    begins_text, ends_text, time_text = _parts(rest, 3)
    begins, ends, each = _share(begins_text), _share(ends_text), _time(time_text)

    def draw(random: np.random.Generator, ranks: int, steps: int) -> Floats:
        held_up = np.zeros((ranks, steps), bool)
        # The share of ranks in a burst at the beginning is that of the long run.
        now = random.random(ranks) < begins / max(begins + ends, 1e-300)
        for step in range(steps):
            held_up[:, step] = now
            changes = random.random(ranks) < np.where(now, ends, begins)
            now = now ^ changes
        return np.where(held_up, each, 0.0)

    return draw


def _of_ranks(rest: str) -> Draw:
    each = np.array([_time(text) for text in rest.split(",")])

    def draw(_: np.random.Generator, ranks: int, steps: int) -> Floats:
        if len(each) != ranks:
            raise DelayError(f"delays of {len(each)} ranks were given for {ranks}")
        return np.repeat(each[:, None], steps, axis=1)

    return draw


class _DelaysRecord(Record):
    milliseconds: Annotated[list[Amount], Meta(min_length=1)]


_FILE = Format(_DelaysRecord, 'give a list of "milliseconds"', DelayError)


def _from_file(path: Path) -> Draw:
    values = np.asarray(_FILE.read(path).milliseconds)
    return lambda random, ranks, steps: random.choice(values * 1e3, (ranks, steps))


#: Kinds with an example, for people.
_KINDS: dict[str, tuple[str, Callable[[str], Draw]]] = {
    "none": ("none", _none),
    "constant": ("constant:5ms (in each step)", _constant),
    "uniform": ("uniform:0-10ms (anything between)", _uniform),
    "exponential": ("exponential:5ms (the mean)", _exponential),
    "lognormal": (
        "lognormal:5ms,0.8 (the median, and the deviation of its logarithm)",
        _lognormal,
    ),
    "spikes": ("spikes:5%,50ms (how often, how long)", _spikes),
    "bursts": (
        "bursts:2%,20%,50ms (how often they begin, end, and how long steps in one are held up)",
        _bursts,
    ),
    "ranks": ("ranks:0,0,5ms,0 (by rank)", _of_ranks),
}


def _parts(rest: str, count: int) -> list[str]:
    parts = rest.split(",")
    if len(parts) != count:
        raise DelayError(f"these have {count} values with commas between them")
    return parts


def _unit(text: str) -> str:
    found = re.search("(us|ms|s)$", text.strip())
    return found[0] if found else ""


def _time(text: str) -> float:
    """Returns microseconds. A 0 needs no unit."""
    unit = _unit(text)
    value = _number(text.strip().removesuffix(unit))
    if not unit and value:
        raise DelayError(f"'{text}' needs one of the units {', '.join(_UNITS)}")
    return value * _UNITS.get(unit, 1.0)


def _share(text: str) -> float:
    value = _number(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if value > 1:
        raise DelayError(f"'{text}' is more than all steps")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise DelayError(f"'{text}' is no number") from error
    if not (np.isfinite(value) and value >= 0):
        raise DelayError(f"'{text}' is negative or no number")
    return value
