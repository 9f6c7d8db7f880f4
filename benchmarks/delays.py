"""Steps under random delays and uneven work, by the bound: the BLS paper's Fig. 7 on one host.

See README.md in this folder for what is compared and how.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import environment, write_json
from delays_dlrm import DELAYS, HETEROGENEOUS, measure_dlrm
from delays_ranks import SleepSettings
from delays_report import plot, tables
from delays_sleep import measure_exchanges, measure_forwards

FULL = SleepSettings(ranks=(4, 8), bounds=(0, 1, 2, 4, 8), steps=200, forward_steps=60, rounds=3)
QUICK = SleepSettings(ranks=(4,), bounds=(0, 2), steps=50, forward_steps=15, rounds=2)


def main() -> None:
    """Runs the parts that the command line asks for."""
    sleep, delays, heterogeneous = FULL, DELAYS, HETEROGENEOUS
    names = ("sleep", "forward", "heterogeneous", "dlrm")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--plot", type=Path, help="write the figure (PNG) to this file")
    parser.add_argument("--quick", action="store_true", help="4 ranks, bounds 0 and 2, short runs")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    arguments = parser.parse_args()
    if arguments.quick:
        sleep = QUICK
        delays = replace(DELAYS, bounds=(0, 2), steps=20, runs=2)
        heterogeneous = replace(HETEROGENEOUS, bounds=(0, 2), steps=6, runs=2)
    parts: dict[str, tuple[Any, Callable[[], list[dict[str, Any]]]]] = {
        "sleep": (sleep, partial(measure_exchanges, sleep)),
        "forward": (sleep, partial(measure_forwards, sleep)),
        "heterogeneous": (heterogeneous, partial(measure_dlrm, heterogeneous)),
        "dlrm": (delays, partial(measure_dlrm, delays)),
    }
    before = environment()
    results = {part: parts[part][1]() for part in arguments.parts}
    print(tables(before, results))
    if arguments.json:
        settings = {part: asdict(parts[part][0]) for part in arguments.parts}
        write_json(arguments.json, "delays", before, settings, results)
    if arguments.plot:
        plot(arguments.plot, before, results)


if __name__ == "__main__":
    main()
