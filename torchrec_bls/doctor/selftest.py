"""The self-tests: two processes exchange messages over a transport, and GPUs read host memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status

TRANSPORTS = ("shm", "verbs", "tcp")

_RANKS = 2
_CURE = (
    "The error's text says what to do, and the documentation's page 'Failures' says more. If torch "
    "was still being imported, try again when the machine is less busy"
)
_CURE_OF_TCP = (
    "GLOO_SOCKET_IFNAME has to name an interface that `ip address` lists with an address; unset, "
    "two processes of one host use 127.0.0.1. A firewall (`nft list ruleset`, `iptables -L`) must "
    "let ranks connect to each other at any port"
)

# Transports that the defaults use on one host. Without the others, ranks of several hosts can't
# connect.
_DEFAULT = "shm"

# Seconds that a process may go on after the other one has failed.
_GRACE = 5.0
_PROGRAM = (sys.executable, "-m", "torchrec_bls.doctor.loopback")
_GPU_PROGRAM = (sys.executable, "-m", "torchrec_bls.doctor.gpu_reads")


def imported_file(folder: Path, rank: int) -> Path:
    """Returns the file that a process makes when its imports are done."""
    return folder / f"{rank}.imported"


def selftest_finding(
    transport: str, deadline: float = 300.0, program: Sequence[str] = _PROGRAM
) -> Finding:
    """Lets two new processes exchange messages over `transport`.

    Args:
        transport: one of TRANSPORTS.
        deadline: seconds for all of it. On a slow machine, importing torch takes most of them.
        program: command of each process, before its arguments.
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
            Status.PROBLEM if transport == _DEFAULT else Status.WARNING,
            "; ".join(failures),
            f"{_CURE}. {_CURE_OF_TCP}" if transport == "tcp" else _CURE,
            facts,
        )
    text = "two processes of this host exchanged messages, and all arrived as they were sent"
    return Finding(f"{transport} self-test", Status.OK, text, facts=facts)


def gpu_selftest_finding(deadline: float = 300.0, program: Sequence[str] = _GPU_PROGRAM) -> Finding:
    """Lets a new process register memory as tables are with each GPU, and read it there.

    Args:
        deadline: seconds for all of it.
        program: command of the process, before its argument.
    """
    start = time.monotonic()
    failure = ""
    try:
        run = subprocess.run(
            [*program, str(deadline)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
            env=_environment(),
        )
        if run.returncode:
            failure = _told(run.returncode, (run.stdout, run.stderr))
    except subprocess.TimeoutExpired:
        failure = f"not finished after {deadline:g} s"
    facts = {"seconds": round(time.monotonic() - start, 1), "failure": failure}
    if failure:
        cure = 'Only lookups on GPUs need it: lookup="direct" with device=torch.device("cuda")'
        return Finding("GPU self-test", Status.WARNING, failure, cure, facts)
    text = "all GPUs read rows of sealed host memory, and all came as they lie"
    return Finding("GPU self-test", Status.OK, text, facts=facts)


def _environment() -> dict[str, str]:
    # A module in the current folder must not replace an installed one.
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def _run(transport: str, deadline: float, program: Sequence[str], folder: Path) -> list[str]:
    """Returns the failures by rank; empty if there was none."""
    end = time.monotonic() + deadline
    environment = _environment()
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
        _wait(processes, end)
        statuses = [process.poll() for process in processes]
        told = [
            f"process {rank}: {_failure(status, folder / str(rank))}"
            for rank, status in enumerate(statuses)
            if status
        ]
        # A process that waits for a failed one has nothing to say.
        return told or [
            f"process {rank}: {_stage(rank, folder)} after {deadline:g} s"
            for rank, status in enumerate(statuses)
            if status is None
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _stage(rank: int, folder: Path) -> str:
    return "not finished" if imported_file(folder, rank).exists() else "still importing torch"


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    """Returns when all have ended, or some time after one has failed, or at `end`."""
    while time.monotonic() < end:
        statuses = [process.poll() for process in processes]
        if None not in statuses:
            return
        if any(statuses):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.05)


def _failure(status: int, output: Path) -> str:
    """Returns how a process failed, by the files of its output."""
    files = [output.with_suffix(name) for name in (".out", ".err")]
    return _told(status, [each.read_text(errors="replace") for each in files])


def _told(status: int, texts: Sequence[str]) -> str:
    """Returns how a process failed, in its own words if there are any."""
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    for text in texts:
        lines = text.strip().splitlines()
        if lines:
            return f"{lines[-1]} ({ended})"
    return ended
