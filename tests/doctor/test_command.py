"""The command `torchrec-bls`, as a user runs it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.doctor.host_tree import add_gpu, add_nvidia_driver, add_roce_device
from torchrec_bls.cli import main
from torchrec_bls.doctor import examination, selftest
from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.devices import find_devices
from torchrec_bls.doctor.report import as_json, as_text

COMMAND = Path(sys.executable).with_name("torchrec-bls")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def hide_behind(folder: Path, distribution: str, version: str) -> str:
    """Returns a search path that finds another version of a distribution than is installed."""
    information = folder / f"{distribution}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    return str(folder)


@pytest.mark.full
def test_doctor_examines_and_tries_this_host() -> None:
    process = run("doctor", "--json")
    report = json.loads(process.stdout)
    assert process.returncode == (0 if report["defaults_will_work"] else 1)
    by_subject = {finding["subject"]: finding for finding in report["findings"]}
    assert by_subject["packages"]["status"] == "ok"
    assert by_subject["private names"]["status"] == "ok", by_subject
    assert by_subject["shm self-test"]["status"] == "ok", by_subject
    assert by_subject["tcp self-test"]["status"] == "ok", by_subject
    if not find_devices(Path("/")):
        assert by_subject["verbs self-test"]["status"] == "ok"
        assert by_subject["verbs self-test"]["text"] == "not tried: no device"
    assert by_subject["CPUs"]["facts"]["usable"] == len(os.sched_getaffinity(0))
    for subject in TRIED:
        assert set(by_subject[subject]["facts"]) == FACTS[subject]


def test_a_broken_trio_is_told_although_the_package_raises(tmp_path: Path) -> None:
    path = hide_behind(tmp_path, "torch", "2.10.0")
    imported = subprocess.run(
        [sys.executable, "-c", "import torchrec_bls"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "VersionError" in imported.stderr
    process = run("doctor", PYTHONPATH=path)
    assert process.returncode == 1
    text = re.sub(r"\s+", " ", process.stdout)
    assert "problem packages torchrec_bls found torch 2.10.0, fbgemm-gpu-cpu 1.8.0" in text
    assert "it needs torch 2.13.0, fbgemm-gpu-cpu (or fbgemm-gpu) 1.8.0" in text
    assert "-> pip install 'torch==2.13.0'" in text
    assert "not tried: the packages don't fit together" in text
    assert text.strip().endswith("The defaults will not work: 2 problems.")
    assert "Traceback" not in process.stderr
    process = run("calibrate", "--out", str(tmp_path / "profile.json"), PYTHONPATH=path)
    assert process.returncode == 1
    assert process.stderr.startswith("torchrec-bls calibrate: torchrec_bls found torch 2.10.0")
    assert "Traceback" not in process.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_lack_of_memory_is_told_by_size_and_by_the_self_test(tmp_path: Path) -> None:
    little = tmp_path / "meminfo"
    little.write_text("MemTotal: 4194304 kB\nMemAvailable: 0 kB\nSwapFree: 0 kB\n")
    private = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount --bind {little} /proc/meminfo"
    tried = subprocess.run([*private, mount], capture_output=True)
    assert tried.returncode == 0, f"run the tests as root, which may mount: {tried.stderr.decode()}"
    process = subprocess.run(
        [*private, f"{mount} && exec {COMMAND} doctor --json"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 1, process.stderr
    by_subject = {finding["subject"]: finding for finding in json.loads(process.stdout)["findings"]}
    assert by_subject["memory"]["status"] == "problem"
    assert by_subject["memory"]["text"].startswith("4,096 MiB, 0 MiB available")
    assert by_subject["shm self-test"]["status"] == "problem"
    assert "no memory for 2 x 4 slots" in by_subject["shm self-test"]["text"]


def test_a_wrong_command_line_is_refused() -> None:
    assert run().returncode == 2
    assert run("doctor", "--html").returncode == 2
    assert "doctor" in run("--help").stdout


def test_the_command_is_part_of_the_distribution() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="torchrec-bls")
    assert entry.value == "torchrec_bls_command:main"


FINDINGS = [
    Finding("first", Status.OK, "all is well", facts={"count": 1}),
    Finding("the second", Status.WARNING, "word " * 40, "do this " * 20),
    Finding("third", Status.PROBLEM, "no", "mend it"),
]


@pytest.mark.parametrize(
    ("findings", "status", "verdict"),
    [
        (FINDINGS[:2], 0, "The defaults will work."),
        (FINDINGS, 1, "The defaults will not work: 1 problem."),
        ([*FINDINGS, FINDINGS[2]], 1, "The defaults will not work: 2 problems."),
    ],
)
def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: Sequence[Finding],
    status: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(main, "examine", lambda: findings)
    assert main.run(["doctor"]) == status
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    assert main.run(["doctor", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["defaults_will_work"] is (status == 0)


def test_text_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = as_text(FINDINGS).splitlines()[1:]
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "ok       first       all is well"
    assert lines[2].startswith("warning  the second  word word")
    assert lines[3].startswith(" " * 21 + "word")
    (cure,) = (line for line in lines if "mend it" in line)
    assert cure == " " * 21 + "-> mend it"


def test_the_form_of_the_json_object() -> None:
    """A change of what stands here is a new FORMAT."""
    report = as_json(FINDINGS)
    assert {name: type(value) for name, value in report.items()} == {
        "format": int,
        "package": str,
        "host": str,
        "system": str,
        "python": str,
        "defaults_will_work": bool,
        "findings": list,
    }
    assert report["format"] == 1
    assert report["findings"][0] == {
        "subject": "first",
        "status": "ok",
        "text": "all is well",
        "cure": "",
        "facts": {"count": 1},
    }
    assert json.loads(json.dumps(report)) == report


FACTS: dict[str, set[str]] = {
    "packages": {"found", "needed"},
    "CPUs": {"usable", "cores", "numa_nodes", "quota_cpus"},
    "memory": {
        "bytes",
        "available_bytes",
        "limit_bytes",
        "left_bytes",
        "small_bytes",
        "usual_bytes",
    },
    "private names": {"missing"},
    "memlock": {"limit_bytes", "exempt", "small_bytes", "usual_bytes"},
    "descriptors": {"limit", "in_use", "small", "usual"},
    "pages of 2 MiB": {"kernel", "shmem_enabled", "pool_pages", "free_pool_pages"},
    "libibverbs": {"loads"},
    "mlx5_0": {"device", "numa_node", "verbs_file", "openable"},
    "mlx5_0 port 1": {
        "device",
        "port",
        "state",
        "link",
        "rate",
        "interface",
        "mtu_bytes",
        "largest_message_bytes",
        "gid_index",
        "gids",
    },
    "network": {"host_name", "host_address", "interfaces"},
    "shm self-test": {"transport", "seconds", "failures"},
    "verbs self-test": {"transport", "seconds", "failures"},
    "tcp self-test": {"transport", "seconds", "failures"},
    "GPUs": {"driver", "gpus"},
    "GPU self-test": {"seconds", "failure"},
}
TRIED = ("private names", "shm self-test", "verbs self-test", "tcp self-test")


def test_the_facts_of_a_host_with_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They start processes that import torch, and the test of the command sees what they say.
    def untried(subject: str) -> Finding:
        return Finding(subject, Status.OK, "", facts=dict.fromkeys(FACTS[subject]))

    monkeypatch.setattr(examination, "names_finding", lambda: untried("private names"))
    monkeypatch.setattr(
        examination, "selftest_finding", lambda transport: untried(f"{transport} self-test")
    )
    monkeypatch.setattr(examination, "gpu_selftest_finding", lambda: untried("GPU self-test"))
    add_roce_device(tmp_path)
    add_gpu(tmp_path, "0000:3b:00.0")
    add_nvidia_driver(tmp_path)
    findings = examination.examine(tmp_path)
    assert {finding.subject: set(finding.facts) for finding in findings} == FACTS
    assert selftest.TRANSPORTS == ("shm", "verbs", "tcp")
    json.dumps(as_json(findings))
