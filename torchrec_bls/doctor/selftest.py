"""The self-test: two processes exchange messages over a transport."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status

TRANSPORTS = ("shm",)

_RANKS = 2
_PROGRAM = (sys.executable, "-m", "torchrec_bls.doctor.loopback")


def selftest_finding(
    transport: str, deadline: float = 120.0, program: Sequence[str] = _PROGRAM
) -> Finding:
    """Lets two new processes exchange messages over `transport`.

    Args:
        transport: one of TRANSPORTS.
        deadline: seconds for all of it; most of them go into importing torch.
        program: what each process runs, before its arguments.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchrec-bls-doctor-") as folder:
        failures = _run(transport, deadline, program, Path(folder))
    facts = {
        "transport": transport,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
    }
    if failures:
        return Finding(
            f"{transport} self-test",
            Status.PROBLEM,
            "; ".join(failures),
            "Mend what stands above, if anything; then the message says what to do",
            facts,
        )
    text = "two processes exchanged messages, and all arrived as they were sent"
    return Finding(f"{transport} self-test", Status.OK, text, facts=facts)


def _run(transport: str, deadline: float, program: Sequence[str], folder: Path) -> list[str]:
    """Returns what failed, by rank; empty if nothing did."""
    end = time.monotonic() + deadline
    # A module in the current folder must not stand for an installed one.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(_RANKS):
            with (
                (folder / f"{rank}.out").open("wb") as out,
                (folder / f"{rank}.err").open("wb") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        [*program, transport, str(rank), str(folder), str(deadline)],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=environment,
                    )
                )
        return [
            f"process {rank}: {failure}"
            for rank, process in enumerate(processes)
            if (failure := _failure(process, end, deadline, folder / str(rank)))
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _failure(process: subprocess.Popen[bytes], end: float, deadline: float, output: Path) -> str:
    try:
        status = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"not finished after {deadline:g} s"
    if status == 0:
        return ""
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    for name in (".out", ".err"):
        lines = output.with_suffix(name).read_text(errors="replace").strip().splitlines()
        if lines:
            return f"{lines[-1]} ({ended})"
    return ended
