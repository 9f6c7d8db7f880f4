"""Runs the steps of the verbs suite on this machine's devices and prints how each went."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.paths import ROOT
from tests.verbs.steps import Step, steps_in_guest, steps_on, torch_step

_LAST_LINES = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every step passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.verbs.suite", description=__doc__)
    parser.add_argument("device", help="that the steps use")
    parser.add_argument("peer", nargs="?", help="a second one, joined with the first by a link")
    parser.add_argument("--out", type=Path, required=True, help="folder of the steps' output")
    parser.add_argument("--short", action="store_true", help="without what needs torch")
    options = parser.parse_args(arguments)
    steps = list(steps_on(options.device))
    if options.peer:
        steps += steps_in_guest(options.device, options.peer)
    else:
        print("skipped: the steps of the guest, which need two devices and spoil them", flush=True)
    if not options.short:
        steps.append(torch_step(options.peer or options.device))
    os.environ["TORCHREC_BLS_TEST_DEVICE"] = options.device
    begin = time.monotonic()
    failed = sum(not _passes(step, options.out) for step in steps)
    seconds = time.monotonic() - begin
    print(f"{len(steps) - failed} of {len(steps)} steps passed, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


def _passes(step: Step, out: Path) -> bool:
    path = out / f"{re.sub('[^a-z0-9]+', '-', step.name.lower())}.log"
    begin = time.monotonic()
    with path.open("w") as log:
        problem = _run(step, log.fileno())
    seconds = time.monotonic() - begin
    print(f"{problem or 'ok':<10}{seconds:8.1f} s  {step.name}", flush=True)
    if problem:
        lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print("".join(f"    {line}\n" for line in lines), end="", flush=True)
    return not problem


def _run(step: Step, log: int) -> str:
    """Returns what is wrong with how the step ended, or nothing."""
    process = subprocess.Popen(
        ["bash", "-c", step.command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(step.deadline)
        return "" if status == 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        return "too late"
    finally:
        # With what it may have left in the background.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
