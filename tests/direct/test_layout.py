"""Which rank has which row: as the plan says, or refused."""

import pytest

from torchrec_bls.direct.layout import Shard, TableLayout, digest_of


def table(*shards: Shard, rows: int = 10) -> TableLayout:
    return TableLayout("t", rows, 8, "FP32", shards)


def test_pieces_are_columns_and_blocks_are_rows() -> None:
    left = [Shard(0, 0, 6, 0, 4), Shard(1, 6, 4, 0, 4)]
    right = [Shard(2, 0, 6, 4, 4), Shard(3, 6, 4, 4, 4)]
    assert table(right[1], left[1], right[0], left[0]).column_pieces() == [left, right]


def test_ranks_without_rows_come_last() -> None:
    blocks = [
        Shard(rank, min(10, 4 * rank), max(0, min(4, 10 - 4 * rank)), 0, 8) for rank in (*range(5),)
    ]
    assert table(*blocks).column_pieces() == [blocks]


@pytest.mark.parametrize("rows", [(4, 6), (6, 3, 1), (4, 4)])
def test_blocks_of_unequal_rows_are_refused(rows: tuple[int, ...]) -> None:
    first, shards = 0, []
    for rank, count in enumerate(rows):
        shards.append(Shard(rank, first, count, 0, 8))
        first += count
    with pytest.raises(ValueError, match="table 't' is planned in blocks of unequal rows"):
        table(*shards, rows=10 if sum(rows) == 10 else 9).column_pieces()


def test_digests_are_equal_where_layouts_are() -> None:
    one, same, other = (table(Shard(owner, 0, 10, 0, 8)) for owner in (0, 0, 1))
    assert digest_of([one]) == digest_of([same]) != digest_of([other])
