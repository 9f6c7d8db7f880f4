"""What is said of files that may be open."""

import resource
from pathlib import Path

import pytest

from tests.doctor.host_tree import write
from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.descriptors import descriptors_finding, descriptors_of


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        (resource.RLIM_INFINITY, Status.OK),
        (10 + 580, Status.OK),
        (10 + 579, Status.WARNING),
        (10 + 21, Status.WARNING),
        (10 + 20, Status.PROBLEM),
    ],
)
def test_what_is_left_counts(tmp_path: Path, limit: int, status: Status) -> None:
    for number in range(10):
        write(tmp_path / f"proc/self/fd/{number}", "")
    finding = descriptors_finding(tmp_path, limit)
    assert finding.status is status
    assert bool(finding.cure) == (status is not Status.OK)
    assert finding.facts["in_use"] == 10
    assert (finding.facts["limit"] is None) == (limit == resource.RLIM_INFINITY)


def test_a_generation_has_an_index_and_pieces_of_each_rank() -> None:
    # Two generations of two indexes with three pieces each, and the control page.
    assert descriptors_of(ranks=2, modules=1, pieces=3) == 17


def test_this_process_is_looked_at() -> None:
    finding = descriptors_finding(Path("/"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert finding.facts["limit"] in (limit, None)
    assert 0 < finding.facts["in_use"] <= len(list(Path("/proc/self/fd").iterdir())) + 3
