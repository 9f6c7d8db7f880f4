"""Steps under random delays and uneven work, by the bound: the BLS paper's Fig. 7 on one host."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.delays.dlrm import DELAYS, HETEROGENEOUS, measure_dlrm
from benchmarks.delays.page import section
from benchmarks.delays.sleep import measure_exchanges, measure_forwards
from benchmarks.harness import record

FULL = {"ranks": (4, 8), "bounds": (0, 1, 2, 4, 8), "steps": 200, "forward_steps": 60, "rounds": 3}
QUICK = {"ranks": (4,), "bounds": (0, 2), "steps": 50, "forward_steps": 15, "rounds": 2}


def main() -> None:
    """Runs the parts that the command line asks for."""
    names = ("sleep", "forward", "heterogeneous", "dlrm")
    parser = record.parser(__doc__, quick="4 ranks, bounds 0 and 2, short runs")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    arguments = parser.parse_args()
    sleep = {**(QUICK if arguments.quick else FULL), "max_delay": 0.010, "dense": 0.005}
    delays, heterogeneous = DELAYS, HETEROGENEOUS
    if arguments.quick:
        delays = replace(DELAYS, bounds=(0, 2), steps=20, runs=2)
        heterogeneous = replace(HETEROGENEOUS, bounds=(0, 2), steps=6, runs=2)
    parts: dict[str, tuple[Any, Callable[[], list[dict[str, Any]]]]] = {
        "sleep": (sleep, partial(measure_exchanges, sleep)),
        "forward": (sleep, partial(measure_forwards, sleep)),
        "heterogeneous": (asdict(heterogeneous), partial(measure_dlrm, heterogeneous)),
        "dlrm": (asdict(delays), partial(measure_dlrm, delays)),
    }
    before = record.environment()
    results = {part: parts[part][1]() for part in arguments.parts}
    settings = {part: parts[part][0] for part in arguments.parts}
    record.publish(arguments.json, "delays", before, settings, results, section)


if __name__ == "__main__":
    main()
