import numpy as np
import pytest
import torch
from torchrec_bls.sharding.calibration.lookups import OwnReading

ROWS, SAMPLES = 9, 5


@pytest.mark.parametrize("pooled", [True, False])
def test_rows_and_sums_are_those_of_the_tables(pooled: bool) -> None:
    random = np.random.default_rng(1)
    dims = (12, 40) if pooled else (12, 12)
    tables = [torch.from_numpy(random.normal(size=(ROWS, dim)).astype("f4")) for dim in dims]
    lengths = random.integers(0, 4, size=2 * SAMPLES)
    ids = random.integers(0, ROWS, size=int(lengths.sum()))

    reading = OwnReading(tables, ids, lengths, pooled)
    reading.read()

    bags = np.split(ids, np.cumsum(lengths)[:-1])
    of_tables = bags[:SAMPLES], bags[SAMPLES:]
    rows = [[t[torch.from_numpy(bag)] for bag in b] for t, b in zip(tables, of_tables, strict=True)]
    if pooled:
        sums = [torch.stack([bag.sum(0) for bag in of_table]) for of_table in rows]
        torch.testing.assert_close(reading.out, torch.cat(sums, dim=1))
    else:
        assert torch.equal(reading.out, torch.cat([torch.cat(of_table) for of_table in rows]))
