"""Steps under random delays and uneven work, by the bound: the BLS paper's Fig. 7 on one host."""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from demo.measure import MEASURED, measure
from demo.settings import Settings
from demo.summary import summarize
from dlrm_demo import deadline_s, make_variants, parse_arguments

from benchmarks.delays.page import section
from benchmarks.delays.sleep import measure_exchanges, measure_forwards
from benchmarks.harness import record
from benchmarks.harness.statistics import Spread
from torchrec_bls.processes import run

SLEEP = {"ranks": (4, 8), "bounds": (0, 1, 2, 4, 8), "steps": 200, "forward_steps": 60, "rounds": 3}
SLEEP |= {"max_delay": 0.010, "dense": 0.005}
QUICK = {"ranks": (4,), "bounds": (0, 2), "steps": 50, "forward_steps": 15, "rounds": 2}
# The synthetic settings of the BLS paper, sec. V-E. Random delays and Criteo's one id a table are
# what the demo runs; with 1 to 100 ids ranks differ in lookups and message sizes.
DELAYS, _ = parse_arguments([])
HETEROGENEOUS = replace(DELAYS, bounds=(0, 1, 2, 4), steps=30, max_delay=0.0, max_ids_per_table=100)

# Pooled sums of row-wise tables have more than one term only with several ids a table, and the
# order in which gloo adds them up may differ.
_TOLERANCE = 1e-4


def measure_dlrm(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the demo's measurement with its `Settings`; one entry for each line of its table.

    Raises:
        RuntimeError: a bound gives other logits than TorchRec.
    """
    of_demo = Settings(**settings)
    with tempfile.TemporaryDirectory(prefix="bls-delays-") as name:
        folder = Path(name)
        ranks = {"deadline_s": deadline_s(of_demo), "start_method": "spawn"}
        run(of_demo.ranks, measure, folder, of_demo, make_variants, **ranks)
        entries = json.loads((folder / MEASURED).read_text())
    return [_result(entry, exact=of_demo.max_ids_per_table == 1) for entry in entries]


def _result(entry: dict[str, Any], *, exact: bool) -> dict[str, Any]:
    line = summarize(entry)
    equal = line.equals_torchrec if exact else line.max_difference < _TOLERANCE
    if not (equal and line.equals_first_bound):
        raise RuntimeError(f"logits differ from TorchRec's or the first bound's: {line}")
    runs = zip(*(rank["times"] for rank in entry["ranks"]), strict=True)
    steps = len(entry["ranks"][0]["times"][0]["slept"]) - 1
    per_step = [1e3 * fmean(times["total"] for times in run) / steps for run in runs]
    return {**asdict(line), "ms_per_step": Spread(per_step)}


def main() -> None:
    """Runs the parts that the command line asks for."""
    names = ("sleep", "forward", "heterogeneous", "dlrm")
    parser = record.parser(__doc__, quick="4 ranks, bounds 0 and 2, short runs")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    arguments = parser.parse_args()
    sleep, delays, heterogeneous = SLEEP, DELAYS, HETEROGENEOUS
    if arguments.quick:
        sleep = SLEEP | QUICK
        delays = replace(DELAYS, bounds=(0, 2), steps=20, runs=2)
        heterogeneous = replace(HETEROGENEOUS, bounds=(0, 2), steps=6, runs=2)
    parts = {
        "sleep": (measure_exchanges, sleep),
        "forward": (measure_forwards, sleep),
        "heterogeneous": (measure_dlrm, asdict(heterogeneous)),
        "dlrm": (measure_dlrm, asdict(delays)),
    }
    before = record.environment()
    settings = {part: parts[part][1] for part in arguments.parts}
    results = {part: parts[part][0](settings[part]) for part in arguments.parts}
    record.publish(arguments.json, "delays", before, settings, results, section)


if __name__ == "__main__":
    main()
