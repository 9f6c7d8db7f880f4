"""Checks the Promela models of this folder with Spin: `make model`, `make test-model` for less.

docs/design/model.md says what the models tell and what they leave out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from instances import Instance, instances

HERE = Path(__file__).parent
# How pan is compiled and called. By breadth, so that a counterexample is a shortest one.
SEARCHES = {
    "states": (["-DBFS", "-DSAFETY"], []),
    "states but deadlocks": (["-DBFS", "-DSAFETY"], ["-E"]),
    # A cycle without progress is one through no progress label, and the models have no such label.
    "cycles": (["-DNP"], ["-l", "-m10000"]),
}
# Without partial order reduction, which finds nothing to reduce where all steps share memory.
# Past this memory (MiB) pan gives up, which fails the instance.
COMPILER = ["gcc", "-O1", "-w", "-DNOREDUCE", "-DCOLLAPSE", "-DMEMLIM=6000"]


class Outcome(NamedTuple):
    """What Spin found in one instance."""

    states: int
    seconds: float
    memory_mib: float
    trail: list[str]
    """The steps to the violation, which is the last one; empty if there is none."""


def run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def number(pattern: str, report: str) -> float:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what pan printed:\n{report}")
    return float(found[1])


def check(instance: Instance) -> Outcome:
    start = time.monotonic()
    model = str(HERE / f"{instance.model}.pml")
    defines = [f"-D{name}={value}" for name, value in instance.defines.items()]
    compiled, called = SEARCHES[instance.search]
    with tempfile.TemporaryDirectory(prefix="bls-model-") as folder:
        run(["spin", *defines, "-a", model], folder)
        run([*COMPILER, *compiled, "-o", "pan", "pan.c"], folder)
        report = run(["./pan", *called], folder)
        trail: list[str] = []
        if number(r"errors: (\d+)", report) > 0:
            trail_file = f"{folder}/{instance.model}.pml.trail"
            trail = readable(run(["spin", *defines, "-T", "-t", "-k", trail_file, model], folder))
        elif "Search not completed" in report or "too small" in report:
            raise RuntimeError(f"pan gave up:\n{report}")
        states = int(number(r"([\d.e+]+) states, stored", report))
        memory = number(r"([\d.]+)\s+total actual memory usage", report)
        return Outcome(states, time.monotonic() - start, memory, trail)


def readable(replay: str) -> list[str]:
    """Keeps what the steps of the model print, up to the violation."""
    steps: list[str] = []
    for line in replay.splitlines():
        if "Error: assertion violated" in line:
            return steps or ["an assertion before the first step"]
        if line.startswith("spin: trail ends"):
            return [*steps, "deadlock"]
        steps.append(line.strip())
    raise RuntimeError(f"no end in the trail:\n{replay}")


def complaint(instance: Instance, outcome: Outcome) -> str | None:
    found = outcome.trail[-1] if outcome.trail else None
    if instance.finds is None:
        return found and f"found: {found}"
    if found is None:
        return f"did not find: {instance.finds}"
    return None if re.fullmatch(instance.finds, found) else f"found another thing: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the models with Spin.")
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    chosen = [i for i in instances() if not (parser.parse_args().quick and i.slow)]
    began = time.monotonic()
    wrong = 0
    # Most of the small ones is the compiler's time; two of the largest fit 6 GB.
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for count, (instance, outcome) in enumerate(
            zip(chosen, pool.map(check, chosen), strict=True), 1
        ):
            problem = complaint(instance, outcome)
            wrong += problem is not None
            print(
                f"[{count}/{len(chosen)}] {instance.name}:",
                f"WRONG, {problem}" if problem else instance.claim,
                f"({outcome.states:,} states, {outcome.seconds:.1f} s, "
                f"{outcome.memory_mib:.0f} MiB)",
                flush=True,
            )
            for step in outcome.trail:
                print(f"    {step}")
    print(f"{len(chosen)} instances, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
