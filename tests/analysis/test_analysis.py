"""The verdict on tables whose rows are known."""

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.sampled import lookup, one_id_each, random_weights, table, written
from torchrec_bls.analysis import analysis as module
from torchrec_bls.analysis.analysis import Analysis, TableAnalysis, analyse
from torchrec_bls.analysis.samples import Lookup, SampledTable
from torchrec_bls.analysis.table_classes import ClassBounds, TableClass
from torchrec_bls.codecs.compression import Compression, Measured

MEASURED = {
    Compression.AS_THEY_ARE: Measured(1, 8e9, 8e9),
    Compression.UNIQUE: Measured(2, 8e9, 8e9),
    Compression.FIXED: Measured(5, 4e9, 4e9),
    Compression.HUFFMAN: Measured(10, 1e9, 2e9),
}


@pytest.fixture(autouse=True)
def _no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda *_: MEASURED)


def analysed(
    path: Path,
    recorded: list[tuple[SampledTable, list[list[Lookup]]]],
    link: float = 1e9,
    bounds: ClassBounds | None = None,
) -> Analysis:
    """Analyses tables with their lookups, [batch][feature]."""
    tables = [each for each, _ in recorded]
    batches = list(zip(*(lookups for _, lookups in recorded), strict=True))
    return analyse(written(path, tables, batches), link, "by hand", bounds or ClassBounds())


def alone(
    path: Path, batches: list[list[Lookup]], each: SampledTable | None = None
) -> TableAnalysis:
    (found,) = analysed(path, [(each or table(), batches)]).tables
    return found


def test_means_over_batches_of_rows_that_differ(tmp_path: Path) -> None:
    weights = random_weights()
    weights[1] = weights[0] + np.float32(0.001)  # one step has both
    weights[0] = weights[1] = np.round(weights[0])
    weights[1] += np.float32(0.001)
    batches = [
        [lookup(weights, one_id_each([0, 1, 2, 3, 3]))],  # 4 rows differ, then 3
        [lookup(weights, [[2], [], [4, 5], [2]])],  # 2 and 2
        [lookup(weights, [[], []])],  # nothing
    ]
    found = alone(tmp_path, batches)
    patterns = found.patterns
    assert patterns.eta == pytest.approx((1 / 4 + 0) / 2)
    assert patterns.homo_index == 1 - patterns.eta
    assert patterns.rows == (5 + 3) / 2
    assert patterns.distinct_ids == (4 + 3) / 2
    assert patterns.distinct_rows == (4 + 2) / 2
    assert patterns.rounded_rows == (3 + 2) / 2
    assert patterns.zero_share == 0
    assert 3.5 < patterns.entropy_bits < (np.log2(24) + np.log2(16)) / 2
    assert found.table_class is TableClass.SMALL
    assert found.bound == 0.01
    assert found.warning is None


def test_features_of_one_table_count_together(tmp_path: Path) -> None:
    weights = random_weights()
    both = [lookup(weights, one_id_each([1, 2])), lookup(weights, one_id_each([2, 3]))]
    patterns = alone(tmp_path, [both], table(features=("f", "g"))).patterns
    assert (patterns.rows, patterns.distinct_ids, patterns.distinct_rows) == (4, 3, 3)


def test_ids_without_bags(tmp_path: Path) -> None:
    lookups = [[lookup(random_weights(), [[1, 1], [], [2]], pooled=False)]]
    patterns = alone(tmp_path, lookups, table(pooled=False)).patterns
    assert (patterns.rows, patterns.distinct_ids, patterns.distinct_rows) == (3, 2, 2)


def test_few_distinct_rows_are_large_and_many_are_medium(tmp_path: Path) -> None:
    weights = random_weights()
    few, many = ([lookup(weights, one_id_each([i % n for i in range(80)]))] for n in (10, 11))
    found = analysed(tmp_path, [(table("few"), [few]), (table("many"), [many])]).tables
    assert [(each.table_class.value, each.bound) for each in found] == [
        ("large", 0.05),
        ("medium", 0.03),
    ]


def test_the_entropy_and_the_zeros_are_those_at_the_bound(tmp_path: Path) -> None:
    weights = np.zeros((100, 8), np.float32)
    weights[:, 0] = np.arange(100) % 2  # two rows that differ
    weights[:50] *= np.float32(0.04)
    batches = [[lookup(weights, one_id_each(range(100)))]]
    found = alone(tmp_path, batches)
    assert found.table_class is TableClass.LARGE and found.bound == 0.05
    # (0, ...) and (1, 0, ...) are left: a value of 16 is not 0.
    assert found.patterns.entropy_bits == pytest.approx(
        -(np.log2(1 / 16) + 15 * np.log2(15 / 16)) / 16
    )
    assert found.patterns.zero_share == 0.75
    assert found.patterns.eta == 0
    assert found.warning == (
        "table 't': 75% of the rows are zero at the bound 0.05: record a trained model, or take "
        "smaller bounds"
    )


def test_half_the_rows_may_be_zero(tmp_path: Path) -> None:
    weights = random_weights()
    weights[:50] = 0
    assert alone(tmp_path, [[lookup(weights, one_id_each(range(100)))]]).warning is None


def test_stages_are_ranked_for_the_link(tmp_path: Path) -> None:
    recorded = [(table(), [[lookup(random_weights(), one_id_each(range(20)))]])]
    (fast,) = analysed(tmp_path / "fast", recorded, link=1.5e9).tables
    (slow,) = analysed(tmp_path / "slow", recorded, link=5e7).tables
    assert fast.ranked[:2] == [Compression.UNIQUE, Compression.FIXED]
    assert slow.ranked[:2] == [Compression.HUFFMAN, Compression.FIXED]
    # Equation 2: 1 / (1 / CR + B * (1 / Tc + 1 / Td)).
    assert fast.speed_up[Compression.UNIQUE] == pytest.approx(1 / (1 / 2 + 1.5 * (1 / 8 + 1 / 8)))
    assert slow.speed_up[Compression.HUFFMAN] == pytest.approx(1 / (1 / 10 + 0.05 * (1 + 1 / 2)))


def test_no_table_is_encoded_where_that_costs_the_others_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {
        Compression.AS_THEY_ARE: Measured(1, 4e9, 4e9),
        Compression.UNIQUE: Measured(1, 2e9, 2e9),
    }
    fast = {**slow, Compression.UNIQUE: Measured(100, 5e10, 5e10)}

    def measured(of: SampledTable, *_: object) -> dict[Compression, Measured]:
        return fast if of.name == "few ids" else slow

    monkeypatch.setattr(module, "measure", measured)
    lookups = [[lookup(random_weights(), one_id_each(range(20)))]]
    recorded = [(table(name), lookups) for name in ("few ids", "a", "b", "c")]
    found = analysed(tmp_path / "four", recorded)
    assert [each.ranked[0] for each in found.tables] == [
        Compression.UNIQUE,
        *[Compression.AS_THEY_ARE] * 3,
    ]
    assert set(found.chosen.values()) == {Compression.AS_THEY_ARE}
    assert found.warnings == [
        "rows of all tables travel as they are: encoding some tables would cost the others more "
        "than it saves"
    ]
    found = analysed(tmp_path / "one", recorded[:1])
    assert found.chosen == {"few ids": Compression.UNIQUE} and not found.warnings


def test_tables_that_cannot_be_compressed_are_left_alone(tmp_path: Path) -> None:
    weights = random_weights()
    some, none = [lookup(weights, [[1]])], [lookup(weights, [[], []])]
    found = analysed(
        tmp_path, [(table("halves", data_type="FP16"), [some]), (table("unused"), [none])]
    )
    assert found.tables == []
    assert found.warnings == [
        "table 'halves' stays float32: its rows are FP16, and only FP32 can be encoded",
        "table 'unused' stays float32: the samples have no ids of it; record more",
    ]


def test_bounds_of_users_and_another_probe(tmp_path: Path) -> None:
    recorded = [(table(), [[lookup(random_weights(), one_id_each(range(20)))]])]
    bounds = ClassBounds(0.5, 1.0, 2.0, probe=1.0)
    (found,) = analysed(tmp_path, recorded, bounds=bounds).tables
    assert found.bound == bounds.of(found.table_class)
    assert found.patterns.rounded_rows <= found.patterns.distinct_rows
