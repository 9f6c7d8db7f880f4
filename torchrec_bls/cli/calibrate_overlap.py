"""`torchrec-bls calibrate --overlap`: adds the overlap of gradients and backward to a profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec_bls.overlap.modes.contention import ModeTimes
    from torchrec_bls.overlap.modes.mode import Mode

_COLUMNS: tuple[tuple[str, Callable[[ModeTimes], float]], ...] = (
    ("startup us", lambda times: times.startup_us),
    ("beside a backward", lambda times: times.overlapped_us(0)),
    ("us/MB", lambda times: 1e6 * times.alone_us_per_byte),
    ("beside a backward", lambda times: 1e6 * times.overlapped_us_per_byte),
    ("backward's rate beside 1 MB", lambda times: times.rate(1e6)),
    ("beside more", lambda times: times.compute_rate),
)


def run(out: Path, minutes: float, world_sizes: Sequence[int] | None) -> int:
    """Measures, writes the profile and prints what is new in it. Returns the exit status.

    Args:
        out: the profile.
        minutes: minutes of measuring.
        world_sizes: numbers of ranks to start; None for the default, and under torchrun.
    """
    from torchrec_bls.overlap.modes.calibration import (
        OverlapSettings,
        calibrate_overlap,
        is_joining,
    )
    from torchrec_bls.processes import RanksFailedError
    from torchrec_bls.sharding.costs.profile import ProfileError

    try:
        if is_joining() and world_sizes:
            raise ValueError(
                f"torchrun has started {os.environ['WORLD_SIZE']} ranks, which are measured:"
                " leave out --world-sizes"
            )
        settings = OverlapSettings(minutes)
        if world_sizes:
            settings = OverlapSettings(minutes, tuple(world_sizes))
        overlap = calibrate_overlap(out, settings)
    except (ProfileError, RanksFailedError, ValueError) as error:
        print(f"torchrec-bls calibrate: {error}", file=sys.stderr)
        return 1
    for (backend, ranks), modes in overlap.items():
        print(f"{out}: all-reduces of {backend} among {ranks} ranks")
        print(table(modes))
    return 0


def table(modes: Sequence[Mode]) -> str:
    """Returns a line for each mode, with its parameters."""
    rows = [["mode", *(title for title, _ in _COLUMNS)]]
    for mode in modes:
        rows.append([mode.name, *(_short(number(mode.times)) for _, number in _COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join(f"  {'  '.join(row)}".rstrip() for row in padded)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
