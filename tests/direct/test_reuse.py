"""A version takes the pieces of the one before whose source rows are the same, and no others."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_bls import _native
from torchrec_bls.direct import steps
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.part_index import IndexRecord, PieceRecord, make_index
from torchrec_bls.direct.steps import content_in_memory
from torchrec_bls.errors import ProtocolError, RendezvousError

# Tables of one owner, of less than a page to several pages. No row ends with a page.
ROWS = [3, 700, 41, 290, 1, 555]
COLUMNS = 7
ROW_BYTES = 4 * COLUMNS


def tables_in_memory() -> FloatTables:
    layouts, places, at = {}, {}, 0
    for number, rows in enumerate(ROWS):
        shard = Shard(0, 0, rows, 0, COLUMNS)
        layouts[f"t{number}"] = TableLayout(f"t{number}", rows, COLUMNS, "FP32", (shard,))
        places[f"t{number}", shard] = at
        at += rows * ROW_BYTES + 36
    digest = digest_of(list(layouts.values()))
    page = _native.ControlPage.create(1, digest)
    return FloatTables(page, digest, layouts, [at], False, places, torch.float32)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"m.t{number}.weight": torch.randn(rows, COLUMNS, generator=generator)
        for number, rows in enumerate(ROWS)
    }


def made(
    tables: FloatTables, version: str, state_dict: Mapping[str, Any], before: OwnerPart | None
) -> OwnerPart:
    pieces = {} if before is None else before.numbered
    return tables.create(0, version, tables.content(0, "m.", state_dict), None, pieces)


def files_of(part: OwnerPart) -> list[int]:
    return [each.segment.address[3] for each in part.pieces]


def check_rows(tables: FloatTables, part: OwnerPart, state_dict: Mapping[str, Any]) -> None:
    """The rows are those of the state dict, and what is behind them is zero."""
    generation = tables.generation(part.label.version, 1, [part])
    expected = torch.zeros(tables.cuts[0].size, dtype=torch.uint8)
    for (name, shard), at in tables.offsets.items():
        rows = state_dict[f"m.{name}.weight"].view(torch.uint8).view(-1)
        expected[at : at + shard.rows * ROW_BYTES] = rows
    assert torch.equal(torch.frombuffer(generation.window, dtype=torch.uint8), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6))))
def test_a_piece_is_made_again_exactly_if_a_row_of_it_has_changed(
    step: int, changed: list[tuple[int, int]]
) -> None:
    tables = tables_in_memory()
    old, new = weights(0), weights(0)
    rows = {(table, row % ROWS[table]) for table, row in changed}
    for table, row in rows:
        new[f"m.t{table}.weight"][row, row % COLUMNS] += 1
    with patch.object(steps, "_STEP", step):
        first = made(tables, "1", old, None)
        second = made(tables, "2", new, first)
        third = made(tables, "3", new, second)
    places = {
        layout.name: place
        for layout in tables.layouts.values()
        for place in [tables.offsets[layout.name, layout.shards[0]]]
    }
    ranges = [
        (places[f"t{table}"] + row * ROW_BYTES, places[f"t{table}"] + (row + 1) * ROW_BYTES)
        for table, row in rows
    ]
    cut = tables.cuts[0]
    assert len(cut.pieces) > 3
    written = 0
    for piece, before, after in zip(cut.pieces, files_of(first), files_of(second), strict=True):
        is_changed = any(
            begin < span.end and span.begin < end for span in piece.spans for begin, end in ranges
        )
        assert (before != after) == is_changed
        written += piece.size * is_changed
    assert (second.facts.bytes_written, second.facts.bytes_reused) == (written, cut.size - written)
    assert files_of(third) == files_of(second) and third.facts.bytes_written == 0
    for part, state_dict in ((first, old), (second, new), (third, new)):
        check_rows(tables, part, state_dict)
    # Whoever has the index of the third finds pieces of all three.
    opened = tables.part_at(0, "3", third.index.address)
    assert files_of(opened) == files_of(third)
    check_rows(tables, opened, new)
    assert [each.version for each in opened.pieces] == [each.version for each in third.pieces]
    assert opened.facts == third.facts


def test_weights_in_memory_are_never_taken_for_those_of_a_version() -> None:
    tables, new = tables_in_memory(), weights(1)
    places = [(new[f"m.{name}.weight"], place) for (name, _), place in tables.offsets.items()]
    live = tables.create(0, "1", content_in_memory(places), None, {})
    check_rows(tables, live, new)
    again = tables.create(0, "2", content_in_memory(places), None, live.numbered)
    given = made(tables, "3", new, again)
    for before, after in ((live, again), (again, given)):
        assert not set(files_of(before)) & set(files_of(after))
        assert after.facts.bytes_reused == 0
    check_rows(tables, given, new)


class Rows:
    """Rows that are read when they are needed, and notes which."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(rows.shape), rows.dtype
        self.tensor_type, self.where = "torch.Tensor", "memory"
        self.reads: list[tuple[int, int]] = []
        self._rows = rows

    def read(self, first: int, end: int) -> torch.Tensor:
        self.reads.append((first, end))
        return self._rows[first:end].clone()

    def whole(self) -> torch.Tensor:
        return self._rows.clone()


def test_each_row_is_read_once_and_few_at_a_time() -> None:
    tables, new = tables_in_memory(), weights(1)
    with patch.object(steps, "_STEP", 10 * ROW_BYTES):
        first = made(tables, "1", new, None)
        for changed in (0, 1):
            new["m.t1.weight"][600] += changed
            sources = {name: Rows(rows) for name, rows in new.items()}
            part = made(tables, "2", sources, first)
            check_rows(tables, part, new)
            assert (part.facts.bytes_written > 0) == bool(changed)
            for source, rows in zip(sources.values(), ROWS, strict=True):
                reads = sorted(source.reads)
                assert {row for read in reads for row in range(*read)} == set(range(rows))
                assert all(end - first <= 10 for first, end in reads)
                # A row in two pieces is read for both.
                assert sum(end - first for first, end in reads) <= rows + len(tables.cuts[0].pieces)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_table_and_row(value: float) -> None:
    tables, new = tables_in_memory(), weights(1)
    first = made(tables, "1", new, None)
    new["m.t3.weight"][123, 4] = new["m.t3.weight"][200, 0] = value
    with pytest.raises(ValueError, match=r"'m.t3.weight' has NaN or infinite .* in row (123|200) "):
        made(tables, "2", new, first)
    # Sums beyond float32 are none.
    new["m.t3.weight"][:] = 3e38
    check_rows(tables, made(tables, "2", new, first), new)


def test_what_reads_other_rows_than_it_announced_is_refused() -> None:
    tables, new = tables_in_memory(), weights(1)
    wrong: Any = Rows(new["m.t1.weight"][:600])
    wrong.shape = (700, COLUMNS)
    with pytest.raises(ValueError, match=r"rows \d+ to 700 of 'm.t1.weight' came as \[20, 7\]"):
        made(tables, "2", {**new, "m.t1.weight": wrong}, None)
    with pytest.raises(ValueError, match=r"'m.t1.weight' is of torch.float64"):
        made(tables, "2", {**new, "m.t1.weight": Rows(new["m.t1.weight"].double())}, None)
    with pytest.raises(ValueError, match=r"'m.t1.weight' has shape \[600, 7\]"):
        made(tables, "2", {**new, "m.t1.weight": Rows(new["m.t1.weight"][:600])}, None)


def test_a_version_whose_piece_nobody_holds_is_not_mapped() -> None:
    tables, new = tables_in_memory(), weights(1)
    part = made(tables, "2", new, None)
    tables.page.record(0, 2, "2", part.index.address)
    assert files_of(tables.open(0, 2, "2")) == files_of(part)
    index = part.index
    del part
    with pytest.raises(RendezvousError, match=r"cannot open shared memory|not there any more"):
        tables.open(0, 2, "2")
    assert index.size > 0


def test_pieces_that_an_index_lists_in_another_order_are_refused() -> None:
    """The label of a piece says which one it is, and of which tables."""
    tables, new = tables_in_memory(), weights(1)
    part = made(tables, "2", new, None)
    one, other, *others = [PieceRecord(piece.segment.address, "2", "") for piece in part.pieces]
    for pieces, says in (
        ([other, one, *others], "has other shards"),
        ([one, one, *others], "has other shards"),
        ([PieceRecord(one.address, "1", ""), other, *others], "version '2', not .* version '1'"),
        ([one, other, *others[1:]], "pieces, but what was announced has"),
    ):
        index, _ = make_index(part.label, IndexRecord(pieces, part.facts), None)
        with pytest.raises(ProtocolError, match=says):
            tables.part_at(0, "2", index.address)
