"""The generator: a pure function of (seed, step, rank), in range, and skewed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch

from torchrec_bls.datasets import CATEGORICAL_NAMES, SyntheticDataset, capped_cardinalities
from torchrec_bls.datasets.synthetic import zipf_ids


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.dense_features, right.dense_features)
        and torch.equal(left.sparse_features.values(), right.sparse_features.values())
        and torch.equal(left.sparse_features.lengths(), right.sparse_features.lengths())
        and torch.equal(left.labels, right.labels)
    )


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    step=st.integers(0, 50),
    rank=st.integers(0, 15),
    cap=st.integers(1, 500),
    most_ids=st.integers(1, 100),
    batch_size=st.integers(1, 20),
)
def test_batches_are_pure_and_in_range(
    seed: int, step: int, rank: int, cap: int, most_ids: int, batch_size: int
) -> None:
    rows = capped_cardinalities(cap)

    def make(steps: int) -> SyntheticDataset:
        return SyntheticDataset(
            rows_per_table=rows,
            batch_size=batch_size,
            steps=steps,
            seed=seed,
            rank=rank,
            max_ids_per_table=most_ids,
        )

    batch = make(step + 1).batch(step)
    assert same(batch, make(step + 9).batch(step))
    assert batch.sparse_features.keys() == list(CATEGORICAL_NAMES)
    assert batch.sparse_features.stride() == batch_size
    assert batch.dense_features.shape == (batch_size, 13)
    assert batch.labels.shape == (batch_size,)
    for name, table_rows in zip(CATEGORICAL_NAMES, rows, strict=True):
        feature = batch.sparse_features[name]
        assert feature.values().min() >= 0
        assert feature.values().max() < table_rows
        assert feature.lengths().min() >= 1
        assert feature.lengths().max() <= min(most_ids, table_rows)


def test_seed_step_and_rank_each_change_the_batch() -> None:
    def make(seed: int, step: int, rank: int) -> Batch:
        return SyntheticDataset(
            rows_per_table=capped_cardinalities(100), batch_size=8, steps=9, seed=seed, rank=rank
        ).batch(step)

    batches = [make(0, 0, 0), make(1, 0, 0), make(0, 1, 0), make(0, 0, 1)]
    assert not any(same(batches[0], other) for other in batches[1:])


def test_iteration_gives_every_step() -> None:
    data = SyntheticDataset(rows_per_table=capped_cardinalities(9), batch_size=2, steps=3, seed=5)
    assert len(data) == 3
    assert all(same(batch, data.batch(step)) for step, batch in zip(range(3), data, strict=True))


def test_ids_follow_the_bounded_zipf_law() -> None:
    rows, draws = 1000, 200_000
    uniform = (np.arange(draws) + 0.5) / draws
    ids = zipf_ids(uniform, np.full(draws, rows))
    counts = np.sort(np.bincount(ids, minlength=rows))[::-1] / draws
    edges = np.arange(1, rows + 2) ** -0.05
    expected = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    np.testing.assert_allclose(counts, expected, atol=1.5 / draws)


def test_popular_ids_are_spread_over_the_table() -> None:
    ids = zipf_ids(np.linspace(0, 0.999, 4000), np.full(4000, 10_000))
    quarters = np.bincount(np.unique(ids) // 2500, minlength=4)
    assert quarters.min() > 0.2 * quarters.sum()


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("steps", -1), ("seed", -1), ("rank", -1), ("max_ids_per_table", 0)],
)
def test_bad_arguments(name: str, value: int) -> None:
    arguments = {"batch_size": 1, "steps": 1, "seed": 1, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SyntheticDataset(rows_per_table=capped_cardinalities(9), **arguments)
