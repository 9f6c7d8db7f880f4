import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_bls.sharding.reuse.statistics import (
    REUSE_BINS,
    ReuseStatistics,
    TableStatistics,
    reuse_factors,
    row_counts,
    table_statistics,
)

from tests.sharding.reuse.generate_batches import bin_edges

FIGURE_6 = [[0, 1, 4, 6], [1, 2, 3, 5, 7], [0, 5, 7], [1, 6]]


def batch_of(samples: list[list[int]], feature: str = "f") -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=[feature],
        values=torch.tensor([i for sample in samples for i in sample], dtype=torch.long),
        lengths=torch.tensor([len(sample) for sample in samples]),
    )


def test_the_papers_figure_6() -> None:
    counts = row_counts(np.concatenate([np.asarray(sample) for sample in FIGURE_6]))
    # Read once: rows 2, 3, 4; twice: 0, 5, 6, 7; three times: 1.
    assert reuse_factors(counts)[:4].tolist() == [3 / 8, 4 / 8, 1 / 8, 0]


@given(counts=st.lists(st.integers(1, 100_000), min_size=1, max_size=40))
def test_bins_against_counting_one_by_one(counts: list[int]) -> None:
    low, high = bin_edges()
    rows = np.zeros(REUSE_BINS)
    for count in counts:
        (where,) = [i for i in range(REUSE_BINS) if low[i] < count <= high[i]]
        rows[where] += 1
    assert reuse_factors(np.asarray(counts)) == pytest.approx(rows / len(counts))


def test_what_reuse_factors_refuse() -> None:
    assert not reuse_factors(np.zeros(0, np.int64)).any()
    with pytest.raises(ValueError, match="at least 1"):
        reuse_factors(np.zeros(1, np.int64))


samples_of_ids = st.lists(st.lists(st.integers(0, 20), max_size=5), min_size=1, max_size=24)


@given(samples=samples_of_ids)
def test_statistics_against_counting_one_by_one(samples: list[list[int]]) -> None:
    statistics = ReuseStatistics.from_batches([batch_of(samples)])["f"]
    assert statistics.pooling_factor == pytest.approx(sum(map(len, samples)) / len(samples))
    for size, unique in zip(statistics.sample_sizes, statistics.unique_at, strict=True):
        width = int(size)
        starts = [i for i in range(0, len(samples), width) if i + width <= len(samples)][:8]
        expected = [len({i for s in samples[at : at + width] for i in s}) for at in starts]
        assert unique == pytest.approx(np.mean(expected))


@given(samples=samples_of_ids, n=st.floats(0, 200))
def test_unique_rows_stay_within_what_is_possible(samples: list[list[int]], n: float) -> None:
    statistics = ReuseStatistics.from_batches([batch_of(samples)], rows={"f": 21})["f"]
    unique = statistics.unique_rows(n)
    assert 0 <= unique <= min(21, n * statistics.pooling_factor) + 1e-9


def test_unique_rows_of_a_power_law_are_interpolated_and_continued() -> None:
    sizes = 2.0 ** np.arange(8)
    statistics = TableStatistics(10.0, sizes, 5 * sizes**0.7, np.zeros(REUSE_BINS))
    for samples in (1, 3, 50, 128, 1000):
        assert statistics.unique_rows(samples) == pytest.approx(5 * samples**0.7)


def test_statistics_of_large_batches_alone_start_from_one_sample() -> None:
    statistics = TableStatistics(4.0, np.array([4096.0]), np.array([256.0]), np.zeros(REUSE_BINS))
    assert statistics.unique_rows(4096) == pytest.approx(256)
    assert statistics.unique_rows(1) == 4
    # Half-way in logarithms; in proportion it would be 4 rows of 256 lookups.
    assert statistics.unique_rows(64) == pytest.approx(32)
    assert statistics.unique_rows(0.5) == 2


def test_batches_are_one_run_of_samples_and_features_of_one_table_count_together() -> None:
    first = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 2, 3]), lengths=torch.tensor([1, 1, 2, 0])
    )
    second = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 9]), lengths=torch.tensor([0, 1, 1, 0]))
    statistics = ReuseStatistics.from_batches([first, second], tables={"a": "t", "b": "t"})
    assert list(statistics) == ["t"]
    assert statistics["t"].pooling_factor == 6 / 4
    assert statistics["t"].unique_at[-1] == 4  # rows 1, 2, 3, 9


def test_what_statistics_refuse() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        ReuseStatistics.from_batches([])
    with pytest.raises(ValueError, match="the first had"):
        ReuseStatistics.from_batches([batch_of([[1]], "a"), batch_of([[1]], "b")])


def test_a_table_that_nobody_reads() -> None:
    nothing = table_statistics([np.zeros(4, np.int64)], [np.zeros(0, np.int64)])
    assert nothing.pooling_factor == 0
    assert nothing.unique_rows(100) == 0
