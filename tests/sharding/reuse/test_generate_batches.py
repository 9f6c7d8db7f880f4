import numpy as np
import pytest
from torchrec_bls.sharding.reuse.statistics import (
    ReuseStatistics,
    TableStatistics,
    table_statistics,
)

from tests.sharding.reuse.generate_batches import generate_batch, generate_table


def zipf_table(samples: int, pooling: int, rows: int, seed: int) -> TableStatistics:
    random = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, rows + 1)
    ids = random.choice(rows, size=samples * pooling, p=popularity / popularity.sum())
    return table_statistics([np.full(samples, pooling)], [ids.astype(np.int64)], rows=rows)


@pytest.mark.parametrize("samples", [256, 1024, 4096])
def test_a_generated_batch_has_the_statistics_it_was_made_from(samples: int) -> None:
    given = {"a": zipf_table(4096, 6, 20_000, 0), "b": zipf_table(4096, 2, 500, 1)}
    made = ReuseStatistics.from_batches([generate_batch(given, samples, seed=3)])
    for name, table in given.items():
        assert made[name].pooling_factor == pytest.approx(table.pooling_factor, rel=1e-3)
        unique = float(made[name].unique_at[-1])
        assert unique == pytest.approx(table.unique_rows(samples), rel=0.08)
    if samples == 4096:
        for name, table in given.items():
            assert made[name].reuse_factors == pytest.approx(table.reuse_factors, abs=0.03)


def test_ids_are_rows_of_the_table_and_another_seed_makes_others() -> None:
    given = {"a": zipf_table(512, 4, 300, 0)}
    first, again, other = (generate_batch(given, 100, seed=seed) for seed in (1, 1, 2))
    assert int(first.values().min()) >= 0 and int(first.values().max()) < 300
    assert first.values().equal(again.values())
    assert not first.values().equal(other.values())


def test_more_samples_than_the_statistics_are_of() -> None:
    with pytest.raises(ValueError, match="1 to 512"):
        generate_table(zipf_table(512, 4, 300, 0), 513, np.random.default_rng(0))
