"""What is said of pages of 2 MiB."""

from pathlib import Path

import pytest

from tests.doctor.host_tree import write
from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.huge_pages import huge_pages_finding

NEVER = "always within_size advise [never] deny force"
DENY = "always within_size advise never [deny] force"


def add_kernel(root: Path, setting: str | None, pool: int = 0) -> None:
    """Adds a kernel with a setting, if it has transparent pages, and pages in its pool."""
    if setting is not None:
        write(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled", setting)
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    write(folder / "nr_hugepages", str(pool))
    write(folder / "free_hugepages", str(pool // 2))


@pytest.mark.parametrize("kernel", ["6.1.0", "6.18.44-fc-v595", "7.0-rc1"])
def test_new_kernels_give_them_on_request(tmp_path: Path, kernel: str) -> None:
    add_kernel(tmp_path, NEVER, pool=8)
    finding = huge_pages_finding(tmp_path, kernel)
    assert finding.status is Status.OK
    assert "4 of 8 in the pool" in finding.text
    assert finding.facts == {
        "kernel": kernel,
        "shmem_enabled": "never",
        "pool_pages": 8,
        "free_pool_pages": 4,
    }


@pytest.mark.parametrize(
    ("kernel", "setting", "reason"),
    [
        ("6.0.19", NEVER, "Linux 6.0.19 makes none on request, 6.1 does"),
        ("5.15.0-1051-aws", NEVER, "Linux 5.15.0-1051-aws makes none"),
        ("6.8.0", DENY, "shmem_enabled is 'deny'"),
        ("6.8.0", None, "this kernel has no transparent ones"),
    ],
)
def test_why_there_are_none(tmp_path: Path, kernel: str, setting: str | None, reason: str) -> None:
    add_kernel(tmp_path, setting)
    finding = huge_pages_finding(tmp_path, kernel)
    assert finding.status is Status.WARNING
    assert finding.text.startswith(reason)
    assert "0 of 0 in the pool" in finding.text
    assert "Linux 6.1" in finding.cure and "vm.nr_hugepages" in finding.cure


def test_this_host_is_described() -> None:
    finding = huge_pages_finding(Path("/"))
    assert finding.subject == "pages of 2 MiB"
    assert set(finding.facts) == {"kernel", "shmem_enabled", "pool_pages", "free_pool_pages"}
