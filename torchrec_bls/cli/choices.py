"""The choices of `torchrec-bls simulate --choose`, and their limits."""

import argparse
from collections.abc import Sequence
from typing import Any

_CHOICES = ("plan", "bound", "codec")
_LIMITS = ("max_memory_gib", "max_latency_ms")
_GIB = 1 << 30
_US_PER_MS = 1000.0


def choices_of(options: argparse.Namespace) -> list[str]:
    """Returns what the user wants to choose.

    Raises:
        ValueError: a choice is unknown, or limits are given without a choice.
    """
    choices = [] if options.choose is None else options.choose.split(",")
    unknown = [each for each in choices if each not in _CHOICES]
    if unknown:
        raise ValueError(
            f"--choose has '{unknown[0]}', but must be of {', '.join(_CHOICES)} with commas"
        )
    if "plan" in choices and options.plan is not None:
        raise ValueError("--choose plan is for several plans, and --plan gives one: leave one out")
    for limit in _LIMITS:
        if not choices and getattr(options, limit) is not None:
            name = limit.replace("_", "-")
            raise ValueError(f"--{name} is a limit of --choose: say what to choose")
    return choices


def check_choices(choices: Sequence[str], bounds: Sequence[int], codecs: Sequence[Any]) -> None:
    """Raises ValueError where a choice has only one candidate, or leaves something open."""
    if "codec" in choices and len(codecs) < 2:
        raise ValueError(
            f"--choose codec needs at least two, but --codec has only {codecs[0].name}"
        )
    of_cells = {"bound", "codec"} & set(choices)
    for left, several in (("bound", len(bounds) > 1), ("codec", len(codecs) > 1)):
        if of_cells and several and left not in choices:
            raise ValueError(
                f"--choose is {','.join(choices)}, but --{left} has several: choose bound,codec, "
                f"or give one {left}"
            )


def chosen_of(options: argparse.Namespace, choices: Sequence[str], outcomes: Sequence[Any]) -> Any:
    """Returns the outcome to take, or None where nothing is to be chosen.

    Raises:
        ValueError: no outcome is within the limits, or a limit is no positive number.
    """
    from torchrec_bls.sharding.simulation.bounds import choose_bound
    from torchrec_bls.sharding.simulation.choose_codec import choose_codec

    if not {"bound", "codec"} & set(choices):
        return None
    memory, latency = (getattr(options, limit) for limit in _LIMITS)
    choose = choose_codec if "codec" in choices else choose_bound
    return choose(
        outcomes,
        max_memory_bytes=None if memory is None else memory * _GIB,
        max_latency_us=None if latency is None else latency * _US_PER_MS,
    )
