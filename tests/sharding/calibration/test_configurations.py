import numpy as np
import pytest
from torchrec_bls.sharding.calibration.configurations import (
    MOST_ELEMENTS,
    LookupConfiguration,
    TableConfiguration,
    draw_ids,
    draw_lookups,
)
from torchrec_bls.sharding.calibration.messages import MOST_BYTES, messages


def test_configurations_fit_and_a_longer_list_begins_with_the_shorter() -> None:
    drawn = draw_lookups(200, seed=1, memory_bytes=2**28)
    assert drawn[:50] == draw_lookups(50, seed=1, memory_bytes=2**28)
    assert drawn != draw_lookups(200, seed=2, memory_bytes=2**28)
    for each in drawn:
        assert each.table_bytes() <= 2**28
        assert sum(each.samples * t.pooling * t.dim for t in each.tables) <= MOST_ELEMENTS
        assert each.pooled or len({table.dim for table in each.tables}) == 1
        assert LookupConfiguration.from_json(each.as_json()) == each


def test_they_cover_what_is_planned() -> None:
    drawn = draw_lookups(200, seed=1, memory_bytes=2**28)
    assert 0.15 < np.mean([not each.pooled for each in drawn]) < 0.35
    assert 0.15 < np.mean([each.weight_bytes == 2 for each in drawn]) < 0.4
    assert {len(each.tables) for each in drawn} >= {1, 2, 4, 12}
    pooling = [table.pooling for each in drawn for table in each.tables]
    assert min(pooling) < 1 and max(pooling) > 40


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.0, 1.5])
def test_ids_are_rows_and_the_more_skewed_the_fewer(skew: float) -> None:
    table = TableConfiguration(rows=5000, dim=8, pooling=2.5, skew=skew)
    lengths, ids = draw_ids(table, 4000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(2.5, rel=0.03)
    assert set(lengths.tolist()) == {2, 3}
    assert len(ids) == lengths.sum()
    assert ids.min() >= 0 and ids.max() < 5000
    # The law itself: the share of the most popular row is its integral over [1, 2).
    power = 1 - skew
    mass = np.log(5001) if power == 0 else (5001**power - 1) / power
    first = np.log(2) if power == 0 else (2**power - 1) / power
    assert np.unique(ids, return_counts=True)[1].max() / len(ids) == pytest.approx(
        first / mass, rel=0.15, abs=0.002
    )


def test_messages_double_and_uneven_ones_differ() -> None:
    made = messages(4, seed=0, memory_bytes=2**30, between=3, uneven=5)
    grid = [m for m in made if m.role == "grid" and m.operation == "all_to_all"]
    sizes = [m.largest_rank_bytes() for m in grid]
    assert sizes == [2**i for i in range(6, 26)]
    assert max(sizes) == MOST_BYTES
    for message in made:
        sent, received = message.totals()
        assert sum(sent) == sum(received)
        if message.role == "uneven":
            assert len(set(sent)) > 1 or max(sent) <= 64
    small = messages(4, seed=0, memory_bytes=2**20, between=3, uneven=5)
    assert max(message.largest_rank_bytes() for message in small) <= 2**20 / 4
