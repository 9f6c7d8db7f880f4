"""What is said of CPUs and of the limits of control groups, on trees of files."""

from pathlib import Path

import pytest

from tests.doctor.host_tree import add_cpus, add_group
from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.cgroup import cpu_quota, memory_left
from torchrec_bls.doctor.host.cpus import cpus_finding

TWO_SOCKETS = ["0", "1", "2", "3"]
HYPERTHREADS = ["0,2", "1,3", "0,2", "1,3"]


def test_cores_and_nodes_are_counted(tmp_path: Path) -> None:
    add_cpus(tmp_path, TWO_SOCKETS, {0: "0-1", 1: "2-3"})
    finding = cpus_finding(tmp_path, range(4))
    assert finding.status is Status.OK
    assert finding.text == "4 CPUs usable, 4 cores, 2 NUMA nodes"
    assert finding.facts == {"usable": 4, "cores": 4, "numa_nodes": [0, 1], "quota_cpus": None}


def test_only_usable_cpus_count(tmp_path: Path) -> None:
    add_cpus(tmp_path, TWO_SOCKETS, {0: "0-1", 1: "2-3"})
    assert cpus_finding(tmp_path, [2, 3]).text == "2 CPUs usable, 2 cores, 1 NUMA node"
    assert cpus_finding(tmp_path, [1, 3]).facts["numa_nodes"] == [0, 1]


def test_shared_cores_are_told(tmp_path: Path) -> None:
    add_cpus(tmp_path, HYPERTHREADS, {0: "0-3"})
    finding = cpus_finding(tmp_path, range(4))
    assert finding.status is Status.OK
    assert finding.text.endswith("2 cores, 1 NUMA node: 2 CPUs share a core with another")


def test_two_cpus_of_one_core_are_a_warning(tmp_path: Path) -> None:
    add_cpus(tmp_path, HYPERTHREADS, {0: "0-3"})
    finding = cpus_finding(tmp_path, [0, 2])
    assert finding.status is Status.WARNING
    assert finding.text == "2 CPUs usable, 1 core, 1 NUMA node: the CPUs share it"


def test_one_cpu_is_a_warning(tmp_path: Path) -> None:
    assert cpus_finding(tmp_path, [0]).status is Status.WARNING


def test_a_quota_below_the_cpus_is_a_warning(tmp_path: Path) -> None:
    add_cpus(tmp_path, TWO_SOCKETS, {0: "0-3"})
    add_group(tmp_path, "0::/", {"cpu.max": "150000 100000"})
    finding = cpus_finding(tmp_path, range(4))
    assert finding.status is Status.WARNING
    assert "the time of 1.5 CPUs" in finding.text
    add_group(tmp_path, "0::/", {"cpu.max": "400000 100000"})
    assert cpus_finding(tmp_path, range(4)).status is Status.OK


V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("0::/job/rank", {"job/rank/cpu.max": "max 100000", "job/cpu.max": "200000 100000"}, 2.0),
        ("0::/job/rank", {"job/rank/cpu.max": "300000 100000", "job/cpu.max": "50000 100000"}, 0.5),
        ("0::/seen/by/the/host", {"cpu.max": "50000 100000"}, 0.5),
        (
            V1,
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_smallest_quota_around_a_process_counts(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    add_group(tmp_path, groups, files)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/", {"memory.max": "max", "memory.current": "5"}, None),
        ("0::/", {"memory.max": "1000", "memory.current": "300"}, (1000, 700)),
        ("0::/", {"memory.max": "1000", "memory.current": "1200"}, (1000, 0)),
        (
            "0::/",
            {
                "memory.max": "1000",
                "memory.current": "300",
                "memory.stat": "anon 50\ninactive_file 200",
            },
            (1000, 900),
        ),
        (
            "0::/job/rank",
            {
                "job/memory.max": "900",
                "job/memory.current": "800",
                "job/rank/memory.max": "500",
                "job/rank/memory.current": "100",
            },
            (900, 100),
        ),
        (
            V1,
            {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "1"},
            (1000, 999),
        ),
        (V1, {"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
    ],
)
def test_the_group_with_the_least_memory_left_counts(
    tmp_path: Path, groups: str, files: dict[str, str], left: tuple[int, int] | None
) -> None:
    add_group(tmp_path, groups, files)
    assert memory_left(tmp_path) == left
