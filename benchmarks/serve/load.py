"""The service under load: its capacity, and what it does below and above it.

The service has one core, the generator another one. What it could answer in overload follows from
the CPU that refusals leave, by what a refusal and an answer cost alone.
"""

import dataclasses
import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.harness.statistics import Spread
from benchmarks.serve import model, shape
from benchmarks.serve.capacity import Capacity, Run, capacity, valid
from benchmarks.serve.generator import Generator, Load, open_inference
from benchmarks.serve.outcome import EARLY, PERCENTILES, REFUSALS, Outcome, latency_ms, table
from benchmarks.serve.page import load_section
from benchmarks.serve.service import served

#: Shares of the capacity.
LEVELS = (0.5, 0.8, 1.5, 3.0)
BUILDS = {"float": "build", "INT8": "build_int8"}
FULL = {
    **{"rows": shape.ROWS, "deadline_s": shape.DEADLINE_S, "options": []},
    **{"first": 200.0, "step_s": 10.0, "run_s": 20.0, "repetitions": 3},
}
# Without a search, and with time enough on a machine that does other things.
QUICK = {
    **{"rows": shape.QUICK_ROWS, "deadline_s": 5.0, "options": ["--no-compile"]},
    **{"first": 50.0, "step_s": 0.0, "run_s": 0.5, "repetitions": 1},
}


def measure(load: Load, settings: dict[str, Any]) -> dict[str, Any]:
    """Capacity of a server, and what it does at each level of it."""
    first, run_s = settings["first"], settings["run_s"]
    result: dict[str, Any] = {"capacity": first, "levels": []}
    with Generator(load) as generator:
        warm = generator.run(first / 4, run_s)
        if not warm.in_time + warm.late:
            raise RuntimeError(f"{load.url} answers nothing:\n{table(warm)}")
        run: Run = generator.run
        found: Capacity | None = None
        if settings["step_s"]:
            found = capacity(run, first, settings["step_s"], run_s)
            result |= {
                "capacity": found.rate,
                "searched": found.searched,
                "confirmed": _summary(found.confirmed),
            }
            run = functools.partial(valid, generator.run)
        for level in LEVELS:
            rate = level * result["capacity"]
            outcomes = [run(rate, run_s, seed) for seed in range(settings["repetitions"])]
            result["levels"].append({"level": level, "rate": rate, **_summary(outcomes)})
    if found is not None:
        result["refusal_ms"] = refusal_ms(load, result["capacity"], run_s)
        of_answer_s = _answer_s(found.confirmed)
        for level in result["levels"]:
            refused_s = sum(level["refused"].values()) * result["refusal_ms"] / 1000
            left = level["server_s"] - refused_s
            level["allowed_rate"] = left / of_answer_s / (run_s * settings["repetitions"])
    return result


def refusal_ms(load: Load, capacity: float, seconds: float) -> float:
    """CPU of a refusal, by how much more a server takes for more of them. Nobody waits meanwhile.

    Args:
        load: of the server.
        capacity: requests a second that it answers.
        seconds: of each of two runs.
    """
    too_late = dataclasses.replace(load, encode=open_inference(load.url, 1e-6))
    with Generator(too_late) as generator:
        few, many = (valid(generator.run, level * capacity, seconds, 0) for level in (1.0, 3.0))
    refusals = sum(many.refused.values()) - sum(few.refused.values())
    return 1000 * (many.server_s - few.server_s) / refusals


def _answer_s(outcomes: list[Outcome]) -> float:
    """CPU seconds of an answer."""
    answers = sum(each.in_time + each.late for each in outcomes)
    return sum(each.server_s for each in outcomes) / answers


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the runs of a level have done; latencies are over all of them."""
    answers = {f"p{percent:g}": latency_ms(outcomes, percent, 200) for percent in PERCENTILES}
    return {
        "in_time_rate": Spread([each.in_time_rate for each in outcomes]),
        "late_percent": Spread([100 * each.late_share for each in outcomes]),
        "refused": sum((Counter(each.refused) for each in outcomes), Counter()),
        "failed": sum((Counter(each.failed) for each in outcomes), Counter()),
        "offered": sum(each.offered for each in outcomes),
        "answers_ms": answers,
        "refusals_p99_ms": latency_ms(outcomes, 99, *REFUSALS),
        "early_refusals_p99_ms": latency_ms(outcomes, 99, *EARLY),
        "lag_p99_ms": Spread([each.lag_p99_ms for each in outcomes]),
        "generator_cores": Spread([each.generator_s / each.seconds for each in outcomes]),
        "server_cores": Spread([each.server_s / each.seconds for each in outcomes]),
        "server_s": sum(each.server_s for each in outcomes),
    }


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, some seconds").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = []
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        rows = settings["rows"]
        model.write_checkpoint(checkpoint, rows)
        for tables, build in model.BUILDS[rows].items():
            with served(build, checkpoint, *settings["options"]) as service:
                load = service.load(rows, settings["deadline_s"])
                results.append({"tables": tables, **measure(load, settings)})
    record.publish(arguments.json, "serving", before, settings, results, load_section)


if __name__ == "__main__":
    main()
