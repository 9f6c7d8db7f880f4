"""Reading Criteo files: the values, the dealing out to ranks, and what malformed rows say."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES

from tests.paths import DATA
from torchrec_bls.datasets import (
    CATEGORICAL_NAMES,
    CriteoDataset,
    capped_cardinalities,
)
from torchrec_bls.datasets import criteo as criteo_module
from torchrec_bls.datasets.criteo_shape import KAGGLE_CARDINALITIES

SAMPLE = DATA / "criteo-tiny" / "train.csv"
ROWS = capped_cardinalities(1000)
HEADER = ",".join(
    ["Id", "Label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
)

Row = tuple[int, list[int | None], list[int | None]]
criteo_rows = st.tuples(
    st.integers(0, 1),
    st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), min_size=13, max_size=13),
    st.lists(st.none() | st.integers(0, 2**32 - 1), min_size=26, max_size=26),
)


def fields(row: Row) -> list[str]:
    label, integers, categories = row
    return [
        str(label),
        *("" if value is None else str(value) for value in integers),
        *("" if value is None else f"{value:08x}" for value in categories),
    ]


def kaggle_text(rows: list[Row]) -> str:
    return "".join("\t".join(fields(row)) + "\n" for row in rows)


def some_row(seed: int) -> Row:
    random = np.random.default_rng(seed)
    return (
        int(random.integers(2)),
        [int(value) for value in random.integers(-3, 1000, 13)],
        [int(value) for value in random.integers(0, 2**32, 26)],
    )


def expected_dense(rows: list[Row]) -> torch.Tensor:
    values = [[max(value or 0, 0) for value in integers] for _, integers, _ in rows]
    return torch.log1p(torch.tensor(values, dtype=torch.float32).reshape(-1, 13))


def expected_ids(rows: list[Row]) -> torch.Tensor:
    ids = [[(value or 0) % rows for value, rows in zip(row[2], ROWS, strict=True)] for row in rows]
    return torch.tensor(ids, dtype=torch.int64).reshape(-1, 26)


def read(path: Path, **keywords: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(CriteoDataset(path, rows_per_table=ROWS, **{"batch_size": 7, **keywords}))
    labels = torch.cat([batch.labels for batch in batches])
    dense = torch.cat([batch.dense_features for batch in batches])
    ids = [batch.sparse_features.values().reshape(26, -1).T for batch in batches]
    return labels, dense, torch.cat(ids)


def test_names_are_torchrecs() -> None:
    assert list(CATEGORICAL_NAMES) == DEFAULT_CAT_NAMES
    assert len(KAGGLE_CARDINALITIES) == 26
    assert sum(KAGGLE_CARDINALITIES) == 33_762_577


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(criteo_rows, min_size=1, max_size=20),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    chunk=st.integers(1, 4000),
    end=st.sampled_from(["\n", "\r\n"]),
    layout=st.sampled_from(["kaggle", "csv", "csv without Id"]),
    compress=st.booleans(),
    final_newline=st.booleans(),
)
def test_any_rows_in_any_layout_are_read_once_by_one_rank(
    rows: list[Row],
    world_size: int,
    batch_size: int,
    chunk: int,
    end: str,
    layout: str,
    compress: bool,
    final_newline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(criteo_module, "CHUNK_BYTES", chunk)
    lines = ["\t".join(fields(row)) for row in rows]
    if layout == "csv":
        lines = [HEADER, *(f"{n},{','.join(fields(row))}" for n, row in enumerate(rows))]
    elif layout == "csv without Id":
        lines = [HEADER.removeprefix("Id,"), *(",".join(fields(row)) for row in rows)]
    content = (end.join(lines) + (end if final_newline else "")).encode()
    path = tmp_path / "rows"
    path.write_bytes(gzip.compress(content) if compress else content)

    ranks = [
        list(
            CriteoDataset(
                path, rows_per_table=ROWS, batch_size=batch_size, rank=rank, world_size=world_size
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = [batch for step in zip(*ranks, strict=True) for batch in step]
    for step in list(zip(*ranks, strict=True))[:-1]:
        assert all(len(batch.labels) == batch_size for batch in step)
    assert torch.cat([b.labels for b in in_order]).tolist() == [row[0] for row in rows]
    dense = torch.cat([batch.dense_features for batch in in_order])
    torch.testing.assert_close(dense, expected_dense(rows), rtol=1e-6, atol=0)
    ids = [batch.sparse_features.values().reshape(26, -1).T for batch in in_order]
    assert torch.equal(torch.cat(ids), expected_ids(rows))
    for batch in in_order:
        assert batch.sparse_features.keys() == DEFAULT_CAT_NAMES
        assert batch.sparse_features.stride() == len(batch.labels)


MALFORMED = [
    (0, "2", "column Label: '2', expected 0 or 1"),
    (0, "", "column Label: '', expected 0 or 1"),
    (1, "1.0", "column I1: '1.0', expected an integer of 32 bits or nothing"),
    (3, "-", "column I3: '-', expected an integer"),
    (13, "2147483648", "column I13: '2147483648', expected an integer of 32 bits"),
    (14, "0x12", "column C1: '0x12', expected 1 to 8 hexadecimal digits"),
    (39, "123456789", "column C26: '123456789', expected 1 to 8 hexadecimal digits"),
    (20, "é", "column C7: 'é', expected"),
    (30, "f" * 90, f"column C17: '{'f' * 40}' (cut), expected"),
]


@pytest.mark.parametrize(("column", "text", "message"), MALFORMED)
def test_malformed_field_names_line_and_column(
    column: int, text: str, message: str, tmp_path: Path
) -> None:
    lines = [fields(some_row(seed)) for seed in range(9)]
    lines[5][column] = text
    path = tmp_path / "train.txt"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="line 6") as caught:
        read(path)
    assert f"{path}, line 6, {message}" in str(caught.value)


def test_line_number_counts_the_header_and_earlier_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_module, "CHUNK_BYTES", 300)
    lines = [f"{n},{','.join(fields(some_row(n)))}" for n in range(20)]
    lines[17] = lines[17].replace(",", ",x", 1)
    path = tmp_path / "train.csv"
    path.write_text("\n".join([HEADER, *lines]))
    with pytest.raises(ValueError, match="line 19, column Label: 'x"):
        read(path)


def test_wrong_number_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(kaggle_text([some_row(0), some_row(1)]) + "\n" + kaggle_text([some_row(2)]))
    with pytest.raises(ValueError, match=r"line 3: 1 columns, expected 40 \(Label to C26\)"):
        read(path)
    path.write_text("\t".join(fields(some_row(0))[1:]) + "\n")
    with pytest.raises(ValueError, match=r"39 columns.*test set, without labels"):
        read(path)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(FileNotFoundError, match=r"no Criteo file .*pass the challenge's train.txt"):
        read(path)
    with pytest.raises(ValueError, match="is a directory"):
        read(tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="line 1: empty"):
        read(path)
    path.write_text(HEADER + "\n")
    with pytest.raises(ValueError, match="has no rows"):
        read(path)
    path.write_text(HEADER.replace("I7", "J7") + "\n1\n")
    with pytest.raises(ValueError, match=r"line 1: .*expected I7, found 'J7'"):
        read(path)
    path.write_text(HEADER + ",C27\n1\n")
    with pytest.raises(ValueError, match="expected 41 columns, found '42 columns'"):
        read(path)
    path.write_bytes(b"1\t" + b"2" * (criteo_module.LONGEST_LINE + 1))
    with pytest.raises(ValueError, match="line 1: longer than"):
        read(path)
    path.write_bytes(gzip.compress(kaggle_text([some_row(n) for n in range(400)]).encode())[:-900])
    with pytest.raises(ValueError, match="damaged or cut short"):
        read(path)


def test_bad_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(kaggle_text([some_row(0)]))
    with pytest.raises(ValueError, match="batch_size is 0"):
        read(path, batch_size=0)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        read(path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="25 entries"):
        CriteoDataset(path, rows_per_table=ROWS[1:], batch_size=1)
    with pytest.raises(ValueError, match="cat_0 0 rows"):
        CriteoDataset(path, rows_per_table=[0, *ROWS[1:]], batch_size=1)
    with pytest.raises(ValueError, match="cap is 0"):
        capped_cardinalities(0)


def test_real_rows_against_the_csv_module() -> None:
    if not SAMPLE.exists():
        pytest.skip("needs the Criteo sample ../shared/data/criteo-tiny/train.csv")
    with SAMPLE.open(newline="") as file:
        records = list(csv.DictReader(file))
    rows: list[Row] = [
        (
            int(record["Label"]),
            [int(record[f"I{n}"]) if record[f"I{n}"] else None for n in range(1, 14)],
            [int(record[f"C{n}"], 16) if record[f"C{n}"] else None for n in range(1, 27)],
        )
        for record in records
    ]
    labels, dense, ids = read(SAMPLE, batch_size=128)
    assert len(rows) == 1999
    assert labels.tolist() == [row[0] for row in rows]
    torch.testing.assert_close(dense, expected_dense(rows), rtol=1e-6, atol=0)
    assert torch.equal(ids, expected_ids(rows))
