"""Deltas on disk: what ranks have written is joined, and anything else is refused with a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchrec_bls.checkpoints import Delta, Head, TablePart, write_part

TABLE = torch.arange(80.0).view(10, 8)


def head(rank: int = 0, ranks: int = 2, name: str = "two@1", base: str = "one") -> Head:
    return Head(name, base, rank, ranks, trained=1.7e9 - rank)


def part(ids: list[int], *columns: tuple[int, int]) -> TablePart:
    """Returns rows of TABLE, of some columns."""
    numbers = torch.tensor(ids, dtype=torch.int64)
    return TablePart(numbers, {begin: TABLE[numbers, begin:end] for begin, end in columns})


def write(folder: Path) -> Path:
    """Writes a delta of two ranks, with tables in shards of rows, of columns, and of one rank."""
    path = folder / "two.delta"
    path.mkdir()
    dense = {"over.weight": torch.ones(2, 3), "over.count": torch.tensor(7), "none": torch.ones(0)}
    by_rows, by_columns = part([1, 4], (0, 8)), part([0, 3], (0, 4))
    write_part(path, head(0), {"rows": by_rows, "columns": by_columns}, dense)
    alone = TablePart(torch.tensor([2]), {0: torch.ones(1, 3, dtype=torch.float16)})
    others = {"rows": part([5, 9], (0, 8)), "columns": part([0, 3], (4, 8)), "alone": alone}
    write_part(path, head(1), others, {})
    return path


def test_the_parts_of_all_ranks_are_joined(tmp_path: Path) -> None:
    with Delta(write(tmp_path)) as delta:
        assert (delta.version, delta.base) == ("two@1", "one")
        assert delta.trained == 1.7e9 - 1  # of the first rank
        rows, dense = delta.rows(), delta.dense()
    assert {name: ids.tolist() for name, (ids, _) in rows.items()} == {
        **{"rows": [1, 4, 5, 9], "columns": [0, 3], "alone": [2]}
    }
    for name in ("rows", "columns"):
        ids, values = rows[name]
        assert ids.dtype == torch.int64 and torch.equal(values, TABLE[ids])
    assert rows["alone"][1].dtype == torch.float16
    assert dense["over.count"].shape == () and int(dense["over.count"]) == 7
    assert torch.equal(dense["over.weight"], torch.ones(2, 3)) and len(dense["none"]) == 0


def test_others_read_the_files(tmp_path: Path) -> None:
    """They are safetensors, in each dtype."""
    dtypes = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    dense = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    write_part(tmp_path, head(ranks=1), {"t": part([1], (0, 8))}, dense)
    [file] = tmp_path.iterdir()
    found = load_file(file)
    assert torch.equal(found["rows/t/0"], TABLE[1:2]) and found["ids/t"].tolist() == [1]
    for name, value in dense.items():
        assert torch.equal(found[f"dense/{name}"], value)
    with Delta(tmp_path) as delta:
        for name, value in delta.dense().items():
            assert torch.equal(value, dense[name])


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'dense/odd' is of torch\.complex128"):
        write_part(tmp_path, head(), {}, {"odd": torch.ones(1, dtype=torch.complex128)})


def test_no_file_is_written_over(tmp_path: Path) -> None:
    write_part(tmp_path, head(), {}, {})
    with pytest.raises(FileExistsError):
        write_part(tmp_path, head(), {}, {})


def rewritten(file: Path, **changed: Any) -> None:
    """Changes tensors of a file, or what it says of itself."""
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()["delta"])
    tensors = load_file(file)
    for name, value in changed.items():
        if name in said:
            said[name] = value
        elif value is None:
            del tensors[name]
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, file, {"delta": json.dumps(said)})


def first(path: Path, **changed: Any) -> None:
    rewritten(path / "rank-0-of-2.safetensors", **changed)


def second(path: Path, **changed: Any) -> None:
    rewritten(path / "rank-1-of-2.safetensors", **changed)


def cut(path: Path) -> None:
    file = path / "rank-1-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def written_twice(path: Path) -> None:
    shutil.copy(path / "rank-1-of-2.safetensors", path / "again.safetensors")


def plain(path: Path) -> None:
    save_file({"t": TABLE}, path / "rank-1-of-2.safetensors")


IDS = torch.tensor([4, 1])
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: [each.unlink() for each in path.iterdir()], "no .safetensors file"),
    "half": (lambda path: (path / "rank-1-of-2.safetensors").unlink(), "files of 1 of 2 ranks"),
    "no first": (lambda path: (path / "rank-0-of-2.safetensors").unlink(), r"of ranks \[1\] of 2"),
    "cut": (cut, "it is cut off, or still written"),
    "twice": (written_twice, r"files of ranks \[0, 1, 1\] of 2"),
    "checkpoint": (plain, "is no file of a delta"),
    "other base": (lambda path: first(path, base="zero"), "files of several deltas"),
    "other name": (lambda path: first(path, name="three@1"), "files of several deltas"),
    "other ranks": (lambda path: first(path, ranks=3), "files of several deltas"),
    "long name": (lambda path: first(path, name="n" * 65), "name: expected.*length <= 64"),
    "later": (lambda path: first(path, version=2), "has version 2, and this package reads 1"),
    "other format": (lambda path: first(path, format="x"), "is not a torchrec_bls delta"),
    "float ids": (lambda path: first(path, **{"ids/rows": IDS.float()}), "ids of 'rows' that are"),
    "no vector": (lambda path: first(path, **{"ids/rows": IDS.view(1, 2)}), "ids of 'rows' that"),
    "more ids": (lambda path: first(path, **{"ids/rows": torch.arange(3)}), r"\[2, 8\] for 3 ids"),
    "one dimension": (
        lambda path: first(path, **{"rows/rows/0": torch.ones(2)}),
        r"of the shape \[2\]",
    ),
    "no ids": (lambda path: first(path, **{"ids/rows": None}), r"ids without rows of \['rows'\]"),
    "no rows": (lambda path: first(path, **{"rows/rows/0": None}), r"rows of \['rows'\]"),
    "no column": (lambda path: first(path, **{"rows/rows/x": TABLE[:2]}), "which no delta has"),
    "stranger": (lambda path: first(path, other=TABLE), "the tensor 'other', which no delta has"),
    "dense of others": (lambda path: second(path, **{"dense/x": TABLE}), "the tensor 'dense/x'"),
}


@pytest.mark.parametrize(("damage", "text"), BAD.values(), ids=BAD)
def test_what_is_no_delta(tmp_path: Path, damage: Callable[[Path], object], text: str) -> None:
    path = write(tmp_path)
    damage(path)
    with pytest.raises(ValueError, match=text) as refused:
        Delta(path)
    assert str(path) in str(refused.value)


BAD_ROWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "order": (lambda path: first(path, **{"ids/rows": IDS}), "not in ascending order"),
    "twice": (lambda path: first(path, **{"ids/rows": IDS * 0 + 1}), "not in ascending order"),
    "negative": (lambda path: first(path, **{"ids/rows": IDS.flip(0) - 2}), "not in ascending"),
    "two ranks": (lambda path: first(path, **{"ids/rows": IDS.flip(0) + 1}), "have row 5"),
    "other dtype": (
        lambda path: first(path, **{"rows/rows/0": TABLE[:2].half()}),
        "of several forms",
    ),
    "fewer columns": (lambda path: first(path, **{"rows/rows/0": TABLE[:2, :4]}), "several forms"),
    "other rows": (
        lambda path: second(path, **{"ids/columns": torch.tensor([0, 2])}),
        "have columns of different rows",
    ),
    "gap": (
        lambda path: first(path, **{"rows/columns/0": TABLE[:2, :3]}),
        r"begin at columns \[0, 4\], of which 4",
    ),
    "overlap": (lambda path: first(path, **{"rows/columns/0": TABLE[:2]}), "of which 4 is not"),
    "no first column": (
        lambda path: first(path, **{"ids/columns": None, "rows/columns/0": None}),
        r"begin at columns \[4\]",
    ),
}


@pytest.mark.parametrize(("damage", "text"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_do_not_fit(tmp_path: Path, damage: Callable[[Path], object], text: str) -> None:
    path = write(tmp_path)
    damage(path)
    with Delta(path) as delta, pytest.raises(ValueError, match=text) as refused:
        delta.rows()
    assert str(path) in str(refused.value)


def test_a_version_that_is_its_own_base(tmp_path: Path) -> None:
    write_part(tmp_path, head(ranks=1, base="two@1"), {}, {})
    with pytest.raises(ValueError, match="makes version 'two@1' of itself"):
        Delta(tmp_path)


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    with Delta(path) as delta:
        file = path / "rank-0-of-2.safetensors"
        file.write_bytes(file.read_bytes() + b"more")
        with pytest.raises(ValueError, match="has changed since"):
            delta.rows()
