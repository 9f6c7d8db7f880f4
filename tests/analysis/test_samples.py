"""Folders of samples: what is written is read, and nothing else is."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.sampled import lookup, random_weights, table, written
from torchrec_bls.analysis.samples import Lookup, Samples, SampleWriter

CURE = "record the samples again with torchrec_bls.record_lookups"
BAGS = st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=5)


@st.composite
def recordings(draw: st.DrawFn) -> Any:
    tables = [
        table(
            name,
            dim=draw(st.integers(1, 3)),
            pooled=draw(st.booleans()),
            weighted=draw(st.booleans()),
            features=tuple(draw(st.lists(st.text(), min_size=1, max_size=2))),
        )
        for name in draw(st.lists(st.text(), min_size=1, max_size=3, unique=True))
    ]
    batches = [
        [
            [lookup(random_weights(dim=each.dim), draw(BAGS), each.pooled) for _ in each.features]
            for each in tables
        ]
        for _ in range(draw(st.integers(1, 2)))
    ]
    return tables, batches


@settings(max_examples=15)
@given(recordings())
def test_what_is_written_is_read(recording: Any) -> None:
    tables, batches = recording
    with tempfile.TemporaryDirectory() as folder:
        samples = written(Path(folder) / "new" / "samples", tables, batches)
        assert samples.tables == tables
        assert samples.batches == len(batches)
        for index, each in enumerate(tables):
            for read, batch in zip(samples.of(each), batches, strict=True):
                for found, wanted in zip(read, batch[index], strict=True):
                    for array, other in zip(found, wanted, strict=True):
                        assert array.dtype == other.dtype and np.array_equal(array, other)


def small(path: Path) -> Path:
    weights = random_weights()
    tables = [table("a"), table("b", features=("f", "g"))]
    written(path, tables, [[[lookup(weights, [[1], [2, 3]])] * len(t.features) for t in tables]])
    return path


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path) -> None:
    small(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=r"is not empty: name another folder .* each rank"):
        SampleWriter(tmp_path, ["a"])
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=f"has no samples.json: it is no .*; {CURE}"):
            Samples(path)


def changed(path: Path, **changes: Any) -> None:
    file = small(path) / "samples.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "no"}))


TABLE: dict[str, Any] = {
    "name": "a",
    "rows": 9,
    "dim": 8,
    "pooled": True,
    "weighted": False,
    "data_type": "FP32",
    "features": ["f"],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "has version 2, and this package reads 1"),
        ({"version": "no"}, "has version None"),
        ({"batches": "no"}, "'batches' is missing"),
        ({"batches": "many"}, "batches: expected int, got 'many'"),
        ({"batches": 0}, "batches: expected int >= 1, got 0"),
        ({"tables": []}, r"tables: expected array of length >= 1, got \[\]"),
        ({"tables": [TABLE, TABLE]}, r"tables \['a'\] are there twice"),
        ({"tables": 7}, "tables: expected array, got 7"),
        ({"tables": [7]}, r"tables\[0\]: expected object, got 7"),
        ({"colour": 1}, "'colour' is unknown"),
        ({"tables": [{**TABLE, "name": 1}]}, r"tables\[0\].name: expected str, got 1"),
        ({"tables": [{**TABLE, "rows": 0}]}, "rows: expected int >= 1, got 0"),
        ({"tables": [{**TABLE, "dim": "8"}]}, "dim: expected int, got '8'"),
        ({"tables": [{**TABLE, "pooled": 1}]}, "pooled: expected bool, got 1"),
        (
            {"tables": [{**TABLE, "features": []}]},
            "features: expected array of length >= 1",
        ),
    ],
)
def test_a_damaged_list_of_tables(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    changed(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"samples\.json:? .*{said}.*: {CURE}"):
        Samples(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_a_list_of_tables_that_is_no_json(text: str, tmp_path: Path) -> None:
    (small(tmp_path) / "samples.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"samples\.json is no JSON.*: {CURE}"):
        Samples(tmp_path)


GOOD = lookup(random_weights(), [[1], [2, 3]])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (GOOD._replace(ids=GOOD.ids.astype(np.int32)), "ids are int32 of 1 dimensions in place"),
        (GOOD._replace(lengths=GOOD.lengths[None]), "lengths are int64 of 2 dimensions in place"),
        (GOOD._replace(rows=GOOD.rows.astype(np.float64)), "rows are float64 of 2 dimensions"),
        (GOOD._replace(ids=GOOD.ids[1:]), "lengths of bags do not add up to 2 ids"),
        (GOOD._replace(lengths=np.array([4, -1])), "lengths of bags do not add up to 3 ids"),
        (GOOD._replace(rows=GOOD.rows[1:]), r"the shape \(1, 8\) in place of \(2, 8\)"),
        (GOOD._replace(rows=GOOD.rows[:, 1:]), r"the shape \(2, 7\) in place of \(2, 8\)"),
    ],
)
def test_arrays_that_no_lookup_gives(bad: Lookup, said: str, tmp_path: Path) -> None:
    samples = written(tmp_path, [table("a")], [[[bad]]])
    with pytest.raises(ValueError, match=rf"batch-00000\.npz, table 'a', is damaged .*{said}"):
        samples.of(samples.tables[0])


def test_rows_of_ids_are_not_rows_of_bags(tmp_path: Path) -> None:
    samples = written(tmp_path, [table("a", pooled=False)], [[[GOOD]]])
    with pytest.raises(ValueError, match=r"the shape \(2, 8\) in place of \(3, 8\)"):
        samples.of(samples.tables[0])


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    samples = Samples(small(tmp_path))
    file = tmp_path / "batch-00000.npz"
    good = file.read_bytes()
    damaged = f"batch-00000.npz, table 'b', is damaged .*: {CURE}"
    flipped = bytearray(good)
    flipped[good.index(GOOD.rows.tobytes())] ^= 1  # of table a, which nobody asks for
    flipped[good.rindex(GOOD.rows.tobytes())] ^= 1
    for content in (b"", b"text", good[: len(good) // 2], bytes(flipped)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=damaged):
            samples.of(samples.tables[1])
    for array in (GOOD.rows, np.array([{}])):
        with file.open("wb") as out:
            np.save(out, array)
        with pytest.raises(ValueError, match=damaged):
            samples.of(samples.tables[1])
    np.savez(file, **{"1.0.ids": GOOD.ids})
    with pytest.raises(ValueError, match=r"1\.0\.lengths"):
        samples.of(samples.tables[1])
    file.unlink()
    with pytest.raises(ValueError, match=f"is missing, of 1 batches that samples.json has: {CURE}"):
        samples.of(samples.tables[1])


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    written(tmp_path, [table("a")], [[[GOOD]]])
    np.savez(tmp_path / "batch-00000.npz", **{"0.0.ids": np.array([{}], dtype=object)})
    samples = Samples(tmp_path)
    with pytest.raises(ValueError, match=r"is damaged .*allow_pickle"):
        samples.of(replace(samples.tables[0]))
