"""Bytes that others wrote: the form decides, the reason has a place, and memory is bounded."""

import gzip
import json
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
from msgspec import Meta
from torchrec_bls.sharding.costs.profile import load_profile

from torchrec_bls.observe.traces.execution_trace import read_execution_trace
from torchrec_bls.observe.traces.kineto import TraceError, read_kineto
from torchrec_bls.records import (
    MOST_BYTES,
    Format,
    Positive,
    Record,
    Whole,
    decode,
    read_bytes,
)


class Refused(ValueError):
    """An error of these files."""


class Table(Record):
    rows: Positive
    share: float = 1.0
    offsets: tuple[Whole, ...] = ()

    def __post_init__(self) -> None:
        if self.rows == 13:
            raise ValueError("13 rows are too many")


class Content(Record):
    format: str
    version: int
    tables: Annotated[list[Table], Meta(min_length=1)]
    by_name: dict[str, dict[str, Table]] | None = None


FILE = Format(Content, "write it anew", Refused, "a plan", (1, 2))


def text_of(tables: Any, **others: Any) -> str:
    return json.dumps({"format": "a plan", "version": 1, "tables": tables, **others})


def test_what_fits_is_returned() -> None:
    content = FILE.decode(text_of([{"rows": 3, "share": 2}]), "x.json")
    assert content.tables == [Table(3, 2.0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "x.json is no JSON, or cut off (Input data was truncated): write it anew"),
        ('{"format": NaN}', "x.json is no JSON, or cut off"),
        ("[]", "x.json is not a a plan: write it anew"),
        ("7", "x.json is not a a plan: write it anew"),
        (text_of([], format="a fan"), "x.json is not a a plan"),
        (text_of([], version=3), "x.json has version 3, and this package reads 1 and 2: write"),
        (text_of([], version=True), "x.json has version True"),
        (text_of([], version=1.0), "x.json has version 1.0"),
        (text_of([]), "x.json: tables: expected array of length >= 1, got []: write it anew"),
        (text_of([{}]), "x.json: tables[0]: 'rows' is missing"),
        (text_of([{"rows": 1}, {"rows": "7"}]), "tables[1].rows: expected int, got '7': write"),
        (text_of([{"rows": 0}]), "tables[0].rows: expected int >= 1, got 0"),
        (text_of([{"rows": True}]), "tables[0].rows: expected int, got True"),
        (text_of([{"rows": 2.5}]), "tables[0].rows: expected int, got 2.5"),
        (text_of([{"rows": 2**63}]), "tables[0].rows: expected int <= 9223372036854775807, got"),
        (text_of([{"rows": 0}]).replace("0}", "9" * 5000 + "}"), "tables[0].rows: "),
        (text_of([{"rows": 1, "share": 0}]).replace("0}", "1e999}"), "share: Number out of range"),
        (text_of([{"rows": 1, "cols": 1}]), "tables[0]: 'cols' is unknown"),
        (text_of([{"rows": 1, "offsets": [0, -1]}]), "offsets[1]: expected int >= 0, got -1"),
        (text_of([{"rows": 13}]), "x.json: tables[0]: 13 rows are too many: write it anew"),
        (
            text_of([{"rows": 1}], by_name={"a": {}, "b": {"c": {"rows": 1}, "d": {"rows": 0}}}),
            "x.json: by_name['b']['d'].rows: expected int >= 1, got 0",
        ),
        (text_of("[").replace('"["', "[" * 10**5 + "]" * 10**5), "objects too deep in each other"),
        ('"' + "\ud800", "x.json is no JSON"),
    ],
)
def test_a_reason_has_its_place(text: str, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        FILE.decode(text, "x.json")
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(Refused, match="x is no JSON, or cut off"):
        decode(b'["\xff"]', list[str], "x", "write it anew", Refused)


def test_of_equal_keys_the_last_one_counts() -> None:
    assert decode('{"rows": 3, "rows": 5}', Table, "x", "") == Table(5)


def test_a_file_is_read_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"1234567890")
    assert read_bytes(path, 10) == b"1234567890"
    with pytest.raises(Refused, match=r"file\.json has more than 9 bytes, and so is not read"):
        read_bytes(path, 9, Refused)
    with pytest.raises(Refused, match="has more than 1,000 bytes"):
        read_bytes(Path("/dev/zero"), 1000, Refused)


def test_a_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json.gz"
    packed = gzip.compress(b"1234567890") + gzip.compress(b"11")
    path.write_bytes(packed)
    assert read_bytes(path, 12) == b"123456789011"
    with pytest.raises(Refused, match="has more than 11 bytes"):
        read_bytes(path, 11, Refused)
    for damaged in (packed[:-9], b"7" + packed, packed[:12] + b"\0" + packed[13:], packed + b"1"):
        path.write_bytes(damaged)
        with pytest.raises(Refused, match=r"file\.json\.gz is a damaged \.gz, or cut off"):
            read_bytes(path, error=Refused)


@pytest.mark.parametrize("part", [b"{}", b"[]", b'{"ph":"X"}'])
def test_a_trace_of_little_but_objects_is_not_read(tmp_path: Path, part: bytes) -> None:
    """The first of them would take 35 times as much memory as its text."""
    path = tmp_path / "rank0.json"
    parts = b",".join([part] * ((MOST_BYTES + (1 << 20)) // (len(part) + 1)))
    path.write_bytes(b'{"schema":"1.1.1-chakra.0.0.4","traceEvents":[' + parts + b'],"nodes":[]}')
    reason = r"rank0\.json has [\d,]+ objects and [\d,]+ lists in [\d,]+ bytes.*so is not read"
    with mock.patch("msgspec.json.decode", side_effect=AssertionError):
        for read in (partial(read_kineto, rank=0), read_execution_trace):
            with pytest.raises(TraceError, match=reason):
                read(path)
    # Others than traces are never that large.
    with pytest.raises(ValueError, match="has more than 16,777,216 bytes, and so is not read"):
        load_profile(path)


def test_a_small_file_that_unpacks_to_much(tmp_path: Path) -> None:
    path = tmp_path / "file.json.gz"
    path.write_bytes(gzip.compress(bytes(200 << 20), 1))
    tracemalloc.start()
    with pytest.raises(Refused, match="has more than"):
        read_bytes(path, 1 << 40, Refused)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 160 << 20
