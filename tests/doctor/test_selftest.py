"""The self-test: real processes, and each way in which one may fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers import slow_but
from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.devices import find_devices
from torchrec_bls.doctor.host.rdma import rdma_findings, why_not_tried
from torchrec_bls.doctor.loopback import ROUNDS, SLOT_BYTES, message, message_bytes
from torchrec_bls.doctor.selftest import TRANSPORTS, selftest_finding

pytestmark = pytest.mark.full


def run_script(
    folder: Path, script: str, deadline: float = 60.0, transport: str = "shm"
) -> Finding:
    """Runs a self-test whose processes run `script`; their pids are left in `folder`."""
    program = folder / "program.py"
    start = (
        f"import os, sys, time\nopen(f'{folder}/pid{{sys.argv[2]}}', 'w').write(str(os.getpid()))"
    )
    program.write_text(f"{start}\n{script}\n")
    return selftest_finding(transport, deadline, [sys.executable, str(program)])


# The command's own test has shared memory and TCP as well.
@pytest.mark.parametrize("transport", slow_but(["verbs"], TRANSPORTS))
def test_messages_arrive_over_every_transport(transport: str) -> None:
    reason = why_not_tried(rdma_findings(find_devices(Path("/"))))
    if transport == "verbs" and reason:
        assert "can't be loaded" not in reason, f"{reason}: apt-get install libibverbs1"
        pytest.skip(f"RDMA: {reason}")
    finding = selftest_finding(transport)
    assert finding.status is Status.OK, finding
    assert finding.facts["transport"] == transport
    assert finding.facts["failures"] == []


def test_the_processes_take_the_transport_that_is_named() -> None:
    finding = selftest_finding("pigeons")
    assert "transport is 'pigeons', but has to be one of" in finding.text


def test_tcp_takes_the_interface_that_is_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    finding = selftest_finding("tcp")
    assert finding.status is Status.WARNING
    assert "GLOO_SOCKET_IFNAME names the interface 'none0', which has no address" in finding.text


def test_only_a_failure_of_shared_memory_keeps_the_defaults_from_working(tmp_path: Path) -> None:
    for transport in TRANSPORTS:
        finding = run_script(tmp_path, "sys.exit(1)", transport=transport)
        assert finding.status is (Status.PROBLEM if transport == "shm" else Status.WARNING)


def test_the_cure_of_tcp_names_interface_and_firewall(tmp_path: Path) -> None:
    cures = {
        transport: run_script(tmp_path, "sys.exit(1)", transport=transport).cure
        for transport in ("shm", "tcp")
    }
    for cause in ("GLOO_SOCKET_IFNAME", "firewall"):
        assert cause in cures["tcp"]
        assert cause not in cures["shm"]


def test_messages_differ_and_some_are_larger_than_a_slot() -> None:
    sizes = [message_bytes(sequence) for sequence in range(ROUNDS)]
    assert sizes[0] == 0
    assert sizes[-1] == 4 * SLOT_BYTES
    assert not message(0, 9).equal(message(1, 9))
    # A message that stands for an earlier one is noticed by its first byte or its size.
    assert message(0, ROUNDS - 1)[0] != message(0, ROUNDS - 2)[0]


def test_an_error_is_told_with_its_process(tmp_path: Path) -> None:
    finding = run_script(tmp_path, "if sys.argv[2] == '1': print('Error: no room'); sys.exit(1)")
    assert finding.status is Status.PROBLEM
    assert finding.text == "process 1: Error: no room (exit status 1)"


def test_an_import_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    finding = run_script(tmp_path, "raise ImportError('undefined symbol: _ZN3c10')")
    assert finding.text == "; ".join(
        f"process {rank}: ImportError: undefined symbol: _ZN3c10 (exit status 1)" for rank in (0, 1)
    )


def test_a_crash_names_the_signal(tmp_path: Path) -> None:
    finding = run_script(tmp_path, "if sys.argv[2] == '0': os.kill(os.getpid(), 4)")
    assert finding.text == "process 0: killed by SIGILL"


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_failed_one(tmp_path: Path) -> None:
    start = time.monotonic()
    finding = run_script(tmp_path, "sys.exit(3) if sys.argv[2] == '1' else time.sleep(600)")
    assert time.monotonic() - start < 50.0  # the deadline is 60 s
    assert finding.text == "process 1: exit status 3"


def test_a_hang_ends_at_the_deadline_and_nothing_is_left(tmp_path: Path) -> None:
    start = time.monotonic()
    script = "if sys.argv[2] == '1': open(f'{sys.argv[3]}/1.imported', 'w')\ntime.sleep(600)"
    finding = run_script(tmp_path, script, deadline=3.0)
    assert time.monotonic() - start < 60.0
    assert finding.status is Status.PROBLEM
    assert finding.text == (
        "process 0: still importing torch after 3 s; process 1: not finished after 3 s"
    )
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


@pytest.mark.slow
def test_the_processes_end_if_the_doctor_is_killed(tmp_path: Path) -> None:
    """Each sets an alarm, since nobody is left to kill it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrec_bls.doctor.loopback", "shm", "0", str(tmp_path), "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(60) in (1, -signal.SIGALRM)  # rank 1 never comes
