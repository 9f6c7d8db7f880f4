import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torchrec_bls.sharding.costs.lookup.trees import Bins, Trees, TreesRecord, empty, grow

from tests.sharding.synthetic import read_back


def one_by_one(trees: Trees, row: np.ndarray) -> float:
    """The prediction by following each tree's nodes."""
    total = 0.0
    for feature, threshold, value in zip(trees.feature, trees.threshold, trees.value, strict=True):
        node = 0
        while node < len(feature):
            node = 2 * node + (1 if row[feature[node]] <= threshold[node] else 2)
        total += value[node - len(feature)]
    return total


@given(rows=arrays(np.float64, (9, 3), elements=st.floats(-4, 4)), seed=st.integers(0, 999))
def test_predicts_what_following_the_nodes_gives(rows: np.ndarray, seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = Trees(
        random.integers(3, size=(4, 7)), random.normal(size=(4, 7)), random.normal(size=(4, 8))
    )
    assert trees.predict(rows) == pytest.approx([one_by_one(trees, row) for row in rows])


def test_json_gives_the_same_trees_back() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(50, 3))
    feature, threshold, leaf = grow(Bins.of(rows), rows[:, 1], np.ones(50), 3, least_weight=20.0)
    assert np.isinf(threshold).any(), "some node should have had too few rows to split"
    trees = Trees(feature[None], threshold[None], random.normal(size=(1, 8)))
    again = read_back(trees.as_json(), TreesRecord).trees(columns=3)
    assert np.array_equal(again.predict(rows), trees.predict(rows))
    assert np.array_equal(again.predict(rows), trees.value[0, leaf])


def test_no_trees_predict_nothing() -> None:
    rows = np.ones((3, 2))
    assert not read_back(empty().as_json(), TreesRecord).trees(columns=2).predict(rows).any()


def test_finds_the_one_cut_that_explains_everything() -> None:
    random = np.random.default_rng(1)
    rows = random.uniform(size=(200, 4))
    target = np.where(rows[:, 2] > 0.6, 1.0, -1.0)
    feature, threshold, leaf = grow(Bins.of(rows, 100), target, np.ones(200), 1, least_weight=1.0)
    assert feature[0] == 2
    assert threshold[0] == pytest.approx(0.6, abs=0.02)
    assert abs(np.corrcoef(leaf, target)[0, 1]) > 0.97


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature": [[0, 0, 5]]}, "column outside"),
        ({"feature": [[0, -1, 0]]}, "column outside"),
        ({"value": [[0.0, 1.0]]}, "complete"),
        ({"value": [[0.0, 1.0, 2.0, float("nan")]]}, "no JSON"),
        ({"threshold": [[0.0, 1.0]]}, "complete"),
    ],
)
def test_damaged_trees_are_refused(change: dict[str, object], message: str) -> None:
    good = {
        "feature": [[0, 1, 0]],
        "threshold": [[0.0, None, 1.0]],
        "value": [[0.0, 1.0, 2.0, 3.0]],
    }
    assert len(read_back(good, TreesRecord).trees(columns=2).value) == 1
    with pytest.raises(ValueError, match=message):
        read_back({**good, **change}, TreesRecord).trees(columns=2)
