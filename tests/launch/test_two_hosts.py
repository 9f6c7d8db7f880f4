"""Jobs over two hosts, which are network namespaces here."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch import two_hosts
from torchrec_bls.doctor.host.devices import find_devices

pytestmark = pytest.mark.full

BIN = Path(sys.executable).parent
MEET = "tests/launch/meet.py"


@pytest.fixture(scope="module", autouse=True)
def hosts() -> None:
    reason = two_hosts.why_not()
    assert not reason, reason


def run(command: Sequence[str], names: Sequence[str]) -> list[str]:
    """Runs a command on both hosts and returns the output of each."""
    command = ["env", f"PATH={BIN}:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH=.", *command]
    ended = two_hosts.run(command, names=names, deadline=180.0)
    assert [process.returncode for process in ended] == [0, 0], "\n".join(
        process.stdout for process in ended
    )
    return [process.stdout for process in ended]


def check(outputs: Sequence[str], ranks_per_host: int, store: str) -> None:
    """Checks that all ranks met, exchanged messages, and were told what these travel by."""
    ranks = 2 * ranks_per_host
    for host, output in enumerate(outputs):
        met = re.findall(r"rank (\d) on (\w+): sum (\d+), store (\S+)", output)
        assert len(met) == ranks_per_host, output
        for _, name, total, announced in met:
            assert (name, int(total), announced) == (f"host{host}", ranks * (ranks + 1) // 2, store)
        # Rank 0 warns for all. A device may be usable from both hosts.
        told = re.findall(r"rank (\d): warned: (.*)", output)
        has_rank_0 = any(rank == "0" for rank, *_ in met)
        assert [rank for rank, _ in told] == ["0"] * has_rank_0 or find_devices(Path("/")), output
        for _, message in told:
            assert "use TCP instead" in message
        total = ranks * (ranks + 1) // 2
        received = re.findall(r"rank \d: received (.*)", output)
        assert received == [str([3 * total, 3000 * total])] * ranks_per_host, output


@pytest.mark.slow
def test_torchrun_where_names_are_known() -> None:
    command = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id test"
    command += f" --rdzv-endpoint host0:29500 {MEET}"
    check(run(command.split(), two_hosts.NAMES_RESOLVE), 2, "host0")


@pytest.mark.slow
def test_the_launcher_where_names_lead_nowhere() -> None:
    command = f"{sys.executable} -m torchrec_bls.launch --endpoint 10.77.0.1:29500 -j 2x1 {MEET}"
    check(run(command.split(), two_hosts.LOOPBACK_NAMES), 1, "10.77.0.1")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torchx uses ast.Str, gone in Python 3.14")
def test_the_component_where_names_lead_nowhere() -> None:
    command = "torchx run -s local_cwd examples/torchx_hosts.py:launch"
    command += f" --endpoint 10.77.0.1:29500 -j 2x1 --script {MEET}"
    check(run(command.split(), two_hosts.LOOPBACK_NAMES), 1, "10.77.0.1")


def wait_until_gone(text: str) -> bool:
    """Returns whether the processes with `text` in their command lines end, within 10 s."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                lines.append(path.read_text(errors="replace"))
        if not any(text in line for line in lines):
            return True
        time.sleep(0.05)
    return False


def test_a_host_that_hangs_is_killed_with_all_that_it_started() -> None:
    seconds = f"600.{os.getpid()}"
    ended = two_hosts.run(["sh", "-c", f"sleep {seconds} & wait"], deadline=2.0)
    assert [process.returncode for process in ended] == [-9, -9]
    assert wait_until_gone(seconds)


def test_the_hosts_end_if_their_starter_is_killed(tmp_path: Path) -> None:
    seconds, started = f"601.{os.getpid()}", tmp_path / "started"
    script = f"touch {started}; sleep {seconds}"
    program = [sys.executable, two_hosts.__file__, "sh", "-c", script]
    starter = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60.0
    while not started.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert started.exists()
    starter.kill()
    starter.wait()
    assert wait_until_gone(seconds)


def test_a_host_that_ends_first_leaves_the_other_its_link() -> None:
    script = "test $(hostname) = host0 || { sleep 1; ip address show dev cable; }"
    ended = two_hosts.run(["sh", "-c", script], deadline=30.0)
    assert [process.returncode for process in ended] == [0, 0]
    assert "10.77.0.2/24" in ended[1].stdout
