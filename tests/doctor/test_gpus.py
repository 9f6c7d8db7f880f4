"""What is said of GPUs, and of their self-test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.doctor.host_tree import add_gpu, add_nvidia_driver, write
from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.gpus import gpus_findings
from torchrec_bls.doctor.selftest import gpu_selftest_finding

BUS = "0000:3b:00.0"


def test_nothing_is_said_of_hosts_without_gpus(tmp_path: Path) -> None:
    assert gpus_findings(tmp_path) == []
    other = tmp_path / "sys/bus/pci/devices/0000:00:02.0"
    write(other / "vendor", "0x1a03")
    write(other / "class", "0x030000")
    network = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    write(network / "vendor", "0x10de")
    write(network / "class", "0x068000")
    assert gpus_findings(tmp_path) == []


def test_a_gpu_is_described(tmp_path: Path) -> None:
    add_gpu(tmp_path, BUS)
    add_nvidia_driver(tmp_path)
    [finding] = gpus_findings(tmp_path)
    assert finding.status is Status.OK
    assert finding.text == (
        f"NVIDIA H100 PCIe at {BUS}, x16 at 32.0 GT/s PCIe, NUMA node 1; driver 580.159.04"
    )
    assert finding.facts["driver"] == "580.159.04"
    assert finding.facts["gpus"] == [
        {
            "bus": BUS,
            "model": "NVIDIA H100 PCIe",
            "numa_node": 1,
            "link_lanes": 16,
            "most_link_lanes": 16,
            "link_speed": "32.0 GT/s PCIe",
        }
    ]


def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    add_gpu(tmp_path, BUS)
    [finding] = gpus_findings(tmp_path)
    assert finding.status is Status.WARNING and "no driver" in finding.text
    assert "--gpus all" in finding.cure and finding.facts["driver"] is None


def test_a_narrow_link_is_named(tmp_path: Path) -> None:
    add_gpu(tmp_path, BUS, lanes=8)
    add_gpu(tmp_path, "0000:5e:00.0")
    add_nvidia_driver(tmp_path)
    [finding] = gpus_findings(tmp_path)
    assert finding.status is Status.WARNING
    assert f"fewer lanes than they could: 8 of 16 at {BUS}. Reads" in finding.text


def tried(script: str, deadline: float = 60.0) -> tuple[Status, str]:
    finding = gpu_selftest_finding(deadline, [sys.executable, "-c", script])
    assert finding.facts["failure"] in ("", finding.text)
    return finding.status, finding.text


def test_a_failure_is_told_in_its_own_words() -> None:
    assert tried("")[0] is Status.OK
    status, text = tried("print('RegistrationError: code 801'); raise SystemExit(1)")
    assert (status, text) == (Status.WARNING, "RegistrationError: code 801 (exit status 1)")
    status, text = tried("import os; os.kill(os.getpid(), 11)")
    assert (status, text) == (Status.WARNING, "killed by SIGSEGV")
    status, text = tried("import time; time.sleep(60)", 0.5)
    assert (status, text) == (Status.WARNING, "not finished after 0.5 s")


@pytest.mark.full
def test_the_program_says_what_torch_lacks() -> None:
    import torch

    if torch.cuda.is_available():
        assert gpu_selftest_finding().status is Status.OK
    else:
        finding = gpu_selftest_finding()
        assert finding.status is Status.WARNING
        assert finding.text.startswith("ValueError: outputs can't be on the device 'cuda'")
