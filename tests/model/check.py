"""Checks the Promela models of this folder with Spin: `make model`, and `make test-model` for less.

docs/design/model.md tells what the models say and what they leave out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from instances import INSTANCES, Instance

HERE = Path(__file__).parent
MEMORY_MIB = 8000
"""Spin gives up beyond this, which fails the instance."""


class Outcome(NamedTuple):
    """What Spin found in one instance."""

    states: int
    memory_mib: float
    seconds: float
    trail: list[str]
    """The steps that lead to the violation, the last one says which; empty if there is none."""


def run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
    return output


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in the output of pan:\n{output}")
    return float(found[1])


def check(instance: Instance) -> Outcome:
    """Searches every reachable state, by breadth, so that a counterexample is a shortest one."""
    defines = [f"-D{name}={value}" for name, value in instance.defines.items()]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bls-model-") as folder:
        model = str(HERE / f"{instance.model}.pml")
        run(["spin", *defines, "-a", model], folder)
        options = ["-DBFS", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
        run(["gcc", "-O1", "-w", *options, "-o", "pan", "pan.c"], folder)
        output = run(["./pan", *([] if instance.deadlocks_count else ["-E"])], folder)
        trail = []
        if number(r"errors: (\d+)", output) > 0:
            replay = run(["spin", *defines, "-T", "-k", f"{folder}/{instance.model}.pml.trail",
                          "-t", model], folder)
            trail = readable(replay)
        elif "Search not completed" in output:
            raise RuntimeError(f"pan gave up:\n{output}")
    return Outcome(
        states=int(number(r"(\d+) states, stored", output)),
        memory_mib=number(r"([\d.]+)\s+total actual memory usage", output),
        seconds=time.monotonic() - started,
        trail=trail,
    )


def readable(replay: str) -> list[str]:
    """Keeps what the model itself printed, up to the violation."""
    steps = []
    for line in replay.splitlines():
        if "Error: assertion violated" in line:
            return steps
        if line.startswith("spin: trail ends"):
            return [*steps, "deadlock"]
        steps.append(line.strip())
    raise RuntimeError(f"no end of the trail in:\n{replay}")


def verdict(instance: Instance, outcome: Outcome) -> str | None:
    """Returns what is wrong with the outcome, if anything is."""
    if instance.finds is None:
        return f"found {outcome.trail[-1]!r}" if outcome.trail else None
    if not outcome.trail:
        return f"holds, but {instance.finds!r} was to be found"
    if not re.fullmatch(instance.finds, outcome.trail[-1]):
        return f"found {outcome.trail[-1]!r} in place of {instance.finds!r}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    arguments = parser.parse_args()
    chosen = [
        i for i in INSTANCES if arguments.only in i.name and not (arguments.quick and i.slow)
    ]
    wrong = []
    started = time.monotonic()
    for position, instance in enumerate(chosen, 1):
        print(f"[{position}/{len(chosen)}] {instance.name}: ", end="", flush=True)
        outcome = check(instance)
        complaint = verdict(instance, outcome)
        if complaint is not None:
            wrong.append(f"{instance.name}: {complaint}")
        print(
            f"{complaint and 'WRONG, ' + complaint or instance.claim}"
            f" ({outcome.states:,} states, {outcome.seconds:.1f} s, {outcome.memory_mib:.0f} MiB)"
        )
        for step in outcome.trail:
            print(f"      {step}")
    print(f"{len(chosen)} instances in {time.monotonic() - started:.0f} s")
    for complaint in wrong:
        print(f"WRONG {complaint}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
