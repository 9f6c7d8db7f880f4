"""No mutation of a file gives anything but its content or a reason."""

from pathlib import Path
from random import Random

import pytest

from tests.mutations.check import check
from tests.mutations.files import KINDS, REFUSALS
from tests.mutations.mutate import mutated
from tests.paths import DATA
from torchrec_bls.observe.traces.kineto import read_kineto

REAL = sorted((DATA / "nccl-traces").glob("*.json.gz"))


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    counts = check(name, 25, 0, tmp_path)
    assert counts["refused"] > 5


@pytest.mark.skipif(not REAL, reason="../shared/data/nccl-traces is not there")
def test_real_traces_of_other_jobs(tmp_path: Path) -> None:
    for path in REAL:
        assert len(read_kineto(path, 0).events) > 4000
    good, path = REAL[0].read_bytes(), tmp_path / "rank0.json.gz"
    refused = 0
    for seed in range(10):
        path.write_bytes(mutated(good, True, Random(seed)))
        try:
            read_kineto(path, 0)
        except REFUSALS as error:
            assert str(error)
            refused += 1
    assert refused
