"""Jobs over two hosts, which are network namespaces here."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import two_hosts

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MEET = "tests/launch/meet.py"


@pytest.fixture(scope="module", autouse=True)
def hosts() -> None:
    if reason := two_hosts.why_not():
        pytest.skip(reason)


def run(command: Sequence[str], names: Sequence[str]) -> list[str]:
    """Runs a command on both hosts and returns the output of each."""
    command = ["env", f"PATH={BIN}:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH=.", *command]
    ended = two_hosts.run(command, names=names, deadline=180.0)
    assert [process.returncode for process in ended] == [0, 0], "\n".join(
        process.stdout for process in ended
    )
    return [process.stdout for process in ended]


def check(outputs: Sequence[str], ranks_per_host: int, store: str) -> None:
    """Checks that all ranks met and that each was told why there is no channel."""
    ranks = 2 * ranks_per_host
    for host, output in enumerate(outputs):
        met = re.findall(r"rank (\d) on (\w+): sum (\d+), store (\S+)", output)
        assert len(met) == ranks_per_host, output
        for _, name, total, announced in met:
            assert (name, int(total), announced) == (f"host{host}", ranks * (ranks + 1) // 2, store)
        told = re.findall(r"rank \d: RendezvousError: (.*)", output)
        assert len(told) == ranks_per_host, output
        for message in told:
            assert "host differs between ranks" in message
            assert "Shared memory joins processes of one host" in message


def test_torchrun_where_names_are_known() -> None:
    command = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id test"
    command += f" --rdzv-endpoint host0:29500 {MEET}"
    check(run(command.split(), two_hosts.NAMES_RESOLVE), 1, "host0")


def test_the_component_where_names_lead_nowhere() -> None:
    command = "torchx run -s local_cwd examples/torchx_hosts.py:launch"
    command += f" --endpoint 10.77.0.1:29500 -j 2x2 --script {MEET}"
    check(run(command.split(), two_hosts.LOOPBACK_NAMES), 2, "10.77.0.1")


def test_nothing_is_left(tmp_path: Path) -> None:
    """A host that hangs is killed with all that it started."""
    script = f"sleep 600 & echo {tmp_path.name}; wait"
    ended = two_hosts.run(["sh", "-c", script], deadline=1.0)
    assert [process.returncode for process in ended] == [-9, -9]
    sleeping = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if tmp_path.name.encode() in path.read_bytes()
    ]
    assert sleeping == []
