"""What is said of memory and of what may be locked."""

import resource
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.doctor.host_tree import add_group, write
from tests.processes import run
from torchrec_bls import BLSConfig, BoundedLagChannel
from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.memory import memlock_finding, memory_finding, ring_bytes

MEBIBYTE = 1 << 20
FIRST_NAMESPACE = "         0          0 4294967295"
IN_A_CONTAINER = "         0     100000      65536"
ALL_CAPABILITIES = "CapInh:\t0000000000000000\nCapEff:\t000001ffffffffff"
NO_CAPABILITIES = "CapInh:\t0000000000000000\nCapEff:\t0000000000000000"


def add_memory(root: Path, total: int, available: int) -> None:
    """Adds a host with so many MiB."""
    lines = [f"MemTotal: {total << 10} kB", f"MemFree: {1 << 10} kB"]
    write(root / "proc/meminfo", "\n".join([*lines, f"MemAvailable: {available << 10} kB"]))


@pytest.mark.parametrize(
    ("available", "status"),
    [
        (1024, Status.OK),
        (256, Status.OK),
        (64, Status.WARNING),
        (16, Status.WARNING),
        (10, Status.PROBLEM),
        (0, Status.PROBLEM),
    ],
)
def test_the_memory_that_is_available_counts(
    tmp_path: Path, available: int, status: Status
) -> None:
    add_memory(tmp_path, 4096, available)
    finding = memory_finding(tmp_path)
    assert finding.status is status
    assert finding.text.startswith(f"4,096 MiB, {available:,} MiB available, no limit")
    assert ("16 MiB with 2 ranks" in finding.text) == (status is not Status.OK)
    assert finding.facts == {
        "bytes": 4096 * MEBIBYTE,
        "available_bytes": available * MEBIBYTE,
        "limit_bytes": None,
        "left_bytes": None,
        "small_bytes": 16 * MEBIBYTE,
        "usual_bytes": 256 * MEBIBYTE,
    }


def test_what_a_group_has_left_counts(tmp_path: Path) -> None:
    add_memory(tmp_path, 4096, 4000)
    limit = {"memory.max": str(512 * MEBIBYTE), "memory.current": str(300 * MEBIBYTE)}
    add_group(tmp_path, "0::/", limit)
    finding = memory_finding(tmp_path)
    assert finding.status is Status.WARNING
    assert finding.text.startswith(
        "4,096 MiB, 4,000 MiB available; the control group allows 512 MiB, and has 212 MiB of it "
        "left; a sharded module reserves 16 MiB with 2 ranks and 256 MiB with 8"
    )
    assert "--memory" in finding.cure
    add_group(tmp_path, "0::/", limit | {"memory.current": str(500 * MEBIBYTE)})
    assert memory_finding(tmp_path).status is Status.PROBLEM
    add_group(tmp_path, "0::/", limit | {"memory.current": "0"})
    assert memory_finding(tmp_path).status is Status.OK


def reserved_bytes(rank: int) -> int:
    with BoundedLagChannel(
        dist.group.WORLD, bound=BLSConfig().bound, slot_bytes=MEBIBYTE, deadline=30.0
    ) as channel:
        return channel.stats().ring_bytes


def test_what_is_needed_is_what_channels_reserve() -> None:
    for reserved in run(2, reserved_bytes):
        assert 2 * reserved == pytest.approx(ring_bytes(2), rel=0.001)  # for ids and embeddings


def make_process(root: Path, capabilities: str, namespace: str) -> None:
    write(root / "proc/self/status", capabilities)
    write(root / "proc/self/uid_map", namespace)


@pytest.mark.parametrize("limit", [64 << 10, 8 * MEBIBYTE])
def test_a_low_limit_names_what_is_needed_and_every_cure(tmp_path: Path, limit: int) -> None:
    make_process(tmp_path, NO_CAPABILITIES, FIRST_NAMESPACE)
    finding = memlock_finding(tmp_path, device=True, limit=limit)
    assert finding.status is Status.WARNING
    assert finding.text == (
        f"{limit >> 10} KiB may be locked; between hosts a rank of a sharded module registers "
        "16 MiB with 2 ranks and 64 MiB with 8, at bound 0 and 1 MiB a message"
    )
    for cure in ("ulimit -l", "limits.conf", "LimitMEMLOCK", "--ulimit memlock"):
        assert cure in finding.cure


def test_a_limit_matters_only_with_a_device(tmp_path: Path) -> None:
    make_process(tmp_path, NO_CAPABILITIES, FIRST_NAMESPACE)
    assert memlock_finding(tmp_path, device=False, limit=0).status is Status.OK


@pytest.mark.parametrize("limit", [64 * MEBIBYTE, resource.RLIM_INFINITY])
def test_a_high_limit_is_well(tmp_path: Path, limit: int) -> None:
    assert memlock_finding(tmp_path, device=True, limit=limit).status is Status.OK


@pytest.mark.parametrize(
    ("capabilities", "namespace", "exempt"),
    [
        (ALL_CAPABILITIES, FIRST_NAMESPACE, True),
        (ALL_CAPABILITIES, IN_A_CONTAINER, False),
        (NO_CAPABILITIES, FIRST_NAMESPACE, False),
    ],
)
def test_the_capability_counts_in_the_first_namespace(
    tmp_path: Path, capabilities: str, namespace: str, exempt: bool
) -> None:
    make_process(tmp_path, capabilities, namespace)
    finding = memlock_finding(tmp_path, device=True, limit=0)
    assert finding.facts["exempt"] is exempt
    assert (finding.status is Status.OK) == exempt
