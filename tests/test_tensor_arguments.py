"""What the compiled core says of tensors that it can't read or write, before it touches any."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls import _native

LENGTHS = torch.tensor([2, 1, 0, 1], dtype=torch.int32)  # two features, two samples
VALUES = torch.tensor([3, 1, 2, 0])
TABLE = torch.arange(8.0).view(4, 2)
LABEL = (0, "1", bytes(32))


def lone_channel() -> _native.Channel:
    """A channel of one rank, to itself."""
    transport = _native.ShmTransport(0, 1, 2, 1 << 16)
    transport.connect([transport.address])
    transport.seal()
    return _native.Channel(transport, 0, 1, 0, 2, 60.0, "lone", 1)


def looked_up() -> _native.BatchIds:
    """The ids above, as they arrive."""
    channel = lone_channel()
    _native.post_ids(channel, LENGTHS, VALUES, None, 2, 2, [2], [])
    ids = _native.BatchIds(channel.wait(), 2, [0])
    channel.release(0, {})
    channel.close()
    return ids


def tables() -> _native.Tables:
    return _native.Tables([(TABLE, False), (TABLE, True)])


def features() -> _native.ShardedFeatures:
    offset = _native.FIRST_TABLE_OFFSET
    segment = _native.TableSegment.create(LABEL, [(TABLE, offset)], offset + TABLE.nbytes, False)
    window = _native.TableWindow([(segment, offset, 4096)])
    columns = [(0, 8, 4, [(0, 0, 4)])]
    of_features = [(0, 0, False, columns), (1, 8, False, columns)]
    return _native.ShardedFeatures(of_features, window)


def write_rows(ids: Any, rows: Any) -> None:
    segment = _native.TableSegment.create(LABEL, [], 8192, False, refreshed=True)
    _native.write_rows([(segment, _native.FIRST_TABLE_OFFSET, 4096)], ids, rows)


def frame_of(rows: Any) -> _native.Frame:
    coded = _native.CodedFeatures([(0, 2, 0.0, False)])
    return _native.Frame.side_by_side(coded, rows, 0, 4)


class Argument(NamedTuple):
    """A call with one argument left open."""

    name: str
    call: Callable[[Any], Any]
    good: torch.Tensor
    wanted: str = "contiguous tensor"


INTEGERS, ROW = torch.ones(4, dtype=torch.int64), torch.zeros(4, 2)
BYTES = torch.zeros(64, dtype=torch.uint8)
READ = torch.zeros(1, dtype=torch.int64)
PAIRS = torch.zeros(4, 2, 2)
ARGUMENTS = {
    "check_ids lengths": Argument(
        "lengths", lambda t: _native.check_ids(t, VALUES, None, 2, [4, 4]), LENGTHS
    ),
    "check_ids values": Argument(
        "values", lambda t: _native.check_ids(LENGTHS, t, None, 2, [4, 4]), VALUES
    ),
    "post_ids weights": Argument(
        "weights",
        lambda t: _native.post_ids(lone_channel(), LENGTHS, VALUES, t, 2, 2, [2], []),
        torch.ones(4),
    ),
    "EqualBags lengths": Argument(
        "lengths", lambda t: _native.EqualBags(t, VALUES, [(4, 4, True)]), LENGTHS
    ),
    "EqualBags ids": Argument("ids", lambda t: _native.EqualBags(None, t, [(4, 4, True)]), VALUES),
    "RowRequests ids": Argument(
        "ids", lambda t: _native.RowRequests(1, [(0, 0, 4)]).ask(t, [4]), VALUES
    ),
    "Tables": Argument(
        "a table", lambda t: _native.Tables([(t, False)]), TABLE, "contiguous matrix"
    ),
    "Tables.stored": Argument(
        "a table",
        lambda t: _native.Tables.stored([(t, 2)]),
        torch.zeros(4, 2, dtype=torch.uint8),
        "contiguous matrix",
    ),
    "copy_table_rows out": Argument(
        "out", lambda t: _native.copy_table_rows(tables(), looked_up(), t), ROW, "contiguous matrix"
    ),
    "sum_rows out": Argument(
        "out",
        lambda t: _native.sum_rows(tables(), looked_up(), t),
        torch.zeros(2, 4),
        "contiguous matrix",
    ),
    "dot_products first": Argument(
        "first",
        lambda t: _native.dot_products(t, PAIRS, torch.zeros(4, 5)),
        ROW,
        "contiguous matrix",
    ),
    "dot_products others": Argument(
        "others", lambda t: _native.dot_products(ROW, t, torch.zeros(4, 5)), PAIRS
    ),
    "dot_products out": Argument(
        "out",
        lambda t: _native.dot_products(ROW, PAIRS, t),
        torch.zeros(4, 5),
        "contiguous matrix",
    ),
    "copy_rows_directly out": Argument(
        "out",
        lambda t: _native.copy_rows_directly(features(), VALUES, [3, 1], READ, t),
        ROW,
        "contiguous matrix",
    ),
    "sum_rows_directly rows_read": Argument(
        "rows_read",
        lambda t: _native.sum_rows_directly(
            features(), LENGTHS, VALUES, None, 2, [3, 1], t, torch.zeros(2, 4)
        ),
        READ,
    ),
    "TableSegment.create": Argument(
        "a part", lambda t: _native.TableSegment.create(LABEL, [(t, 4096)], 8192, False), TABLE
    ),
    "write_rows ids": Argument("ids", lambda t: write_rows(t, ROW), VALUES),
    "write_rows rows": Argument("rows", lambda t: write_rows(VALUES, t), ROW, "contiguous matrix"),
    "encode_rows rows": Argument(
        "rows", lambda t: _native.encode_rows(0, t, BYTES), ROW, "matrix with contiguous rows"
    ),
    "encode_rows out": Argument("out", lambda t: _native.encode_rows(0, ROW, t), BYTES),
    "encode_frame rows": Argument(
        "rows", lambda t: _native.encode_frame(frame_of(t)), ROW, "matrix with contiguous rows"
    ),
    "decode_frame data": Argument(
        "data", lambda t: _native.decode_frame(t, frame_of(ROW.clone())), BYTES
    ),
    "Buffers.whole": Argument("a tensor", lambda t: _native.Buffers.whole([t]), ROW),
    "Buffers.split": Argument("tensor", lambda t: _native.Buffers.split(t, [32]), ROW),
    "all_reduce": Argument("tensor", lambda t: _native.all_reduce(lone_channel(), t, 0), ROW),
}
# Of these, every dtype is fine: only their bytes are read or written.
OF_ANY_DTYPE = (
    "Tables",
    "copy_table_rows out",
    "copy_rows_directly out",
    "TableSegment.create",
    "write_rows rows",
    "Buffers.whole",
    "Buffers.split",
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_that_can_not_be_read_or_written_are_refused(name: str) -> None:
    argument, call, good, wanted = ARGUMENTS[name]
    odd = {"on meta": good.to("meta"), "layout torch.sparse_coo": good.to_sparse()}
    if name not in OF_ANY_DTYPE:
        odd["torch.complex64"] = good.to(torch.complex64)
    if good.numel() > 1:
        odd["strides [0"] = good[:1].expand(good.shape)
    for fault, tensor in odd.items():
        message = f"^{argument} is .*{re.escape(fault)}.*, but must be a {wanted}.* on the CPU$"
        with pytest.raises(ValueError, match=message):
            call(tensor)
    for other in (good.tolist(), good.numpy(), None):
        if other is None and name in ("post_ids weights", "EqualBags lengths"):
            continue
        with pytest.raises(TypeError, match=f"^{argument} is a .*, but must be a torch.Tensor$"):
            call(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _native.check_ids(LENGTHS[:3].clone(), VALUES, None, 2, [4, 4]),
            "lengths has 3 items, but must have 4",
        ),
        (
            lambda: _native.post_ids(lone_channel(), LENGTHS, VALUES, torch.ones(3), 2, 2, [2], []),
            "weights has 3 items, but must have 4",
        ),
        (
            lambda: _native.EqualBags(LENGTHS, VALUES, [(4, 3, True)]),
            "ids has 4 items, but must have 3",
        ),
        (
            lambda: _native.EqualBags(LENGTHS, VALUES, [(5, 4, True)]),
            "lengths has 4 items, but must have 5",
        ),
        (
            lambda: _native.RowRequests(1, [(0, 0, 4)]).ask(VALUES, [5]),
            "ids has 4 items, but must have 5",
        ),
        (
            lambda: _native.copy_table_rows(tables(), looked_up(), torch.zeros(3, 2)),
            "out has 3 rows, but must have 4",
        ),
        (
            lambda: _native.dot_products(ROW, torch.zeros(3, 2, 2), torch.zeros(4, 5)),
            "others has 12 items, but must have 8",
        ),
        (
            lambda: _native.dot_products(ROW, PAIRS, torch.zeros(3, 5)),
            "out has 3 rows, but must have 4",
        ),
        (
            lambda: _native.dot_products(ROW, PAIRS, torch.zeros(4, 4)),
            "out has 4 columns, but must have 5",
        ),
        (
            lambda: _native.sum_rows(tables(), looked_up(), torch.zeros(2, 3)),
            "out has 3 columns, but must have 4",
        ),
        (
            lambda: _native.post_table_rows(
                lone_channel(), tables(), looked_up(), torch.zeros(5, 2), 2
            ),
            "own has 5 rows, but 4 from number 2 on are needed",
        ),
        (
            lambda: _native.post_pooled_rows(
                lone_channel(), tables(), looked_up(), torch.zeros(2, 5), 2
            ),
            "own has 5 columns, but 4 from number 2 on are needed",
        ),
        (
            lambda: _native.sum_rows(
                _native.Tables([(TABLE.double(), False)] * 2), looked_up(), torch.zeros(2, 8)
            ),
            "only tables of torch.float32 can be pooled",
        ),
        (
            lambda: _native.post_grouped_rows(lone_channel(), ROW, [3], [0], True),
            "rows has 4 rows, but must have 3",
        ),
        (
            lambda: _native.post_grouped_rows(lone_channel(), ROW, [-1, 5], [0], True),
            "a count is negative",
        ),
        (
            lambda: _native.post_grouped_rows(lone_channel(), ROW, [4], [1], True),
            "rank 1 of 1",
        ),
        (lambda: _native.ColumnGroups([(-1, 1, 0, 2)]), "columns of no rank"),
        (
            lambda: _native.post_rows(lone_channel(), ROW, [5]),
            "rows has 4 rows, but must have 5",
        ),
        (
            lambda: _native.post_columns(lone_channel(), ROW, _native.ColumnGroups([(0, 1, 1, 2)])),
            "rows has 2 columns, but 3 from number 0 on are needed",
        ),
        (
            lambda: _native.encode_rows(0, ROW, BYTES[:31].clone()),
            "out has 31 bytes, but 32 from number 0 on are needed",
        ),
        (
            lambda: _native.encode_frame(frame_of(torch.zeros(3, 2))),
            "rows has 3 rows, but 4 from number 0 on are needed",
        ),
        (
            lambda: _native.Buffers.split(ROW, [16, 8]),
            "tensor has 32 bytes, but must have 24",
        ),
    ],
)
def test_tensors_of_other_sizes_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_blocks_outside_their_window_are_refused() -> None:
    segment = _native.TableSegment.create(LABEL, [], 8192, False)
    window = _native.TableWindow([(segment, 4096, 4096)])
    for block in ((0, 4000, 48), (1, 4096, 1)):
        columns = [(0, 8, 48, [block])]
        with pytest.raises(ValueError, match=r"has \d+ .*, but .* on are needed"):
            _native.ShardedFeatures([(0, 0, False, columns)], window)


def test_nothing_is_posted_where_a_tensor_is_refused() -> None:
    channel = lone_channel()
    for odd in (VALUES.double(), VALUES[:3].clone()):
        with pytest.raises(ValueError, match="values"):
            _native.post_ids(channel, LENGTHS, odd, None, 2, 2, [2], [])
    assert channel.posted == 0


class Derived(torch.Tensor):
    """A class whose tensors are read by their attributes."""


def test_parameters_and_derived_tensors_are_read_like_others() -> None:
    for of_class in (torch.nn.Parameter, lambda t: t.as_subclass(Derived)):
        out = of_class(torch.zeros(4, 2))
        derived = _native.Tables([(of_class(TABLE.clone()), False)] * 2)
        _native.copy_table_rows(derived, looked_up(), out)
        assert torch.equal(out.detach().as_subclass(torch.Tensor), TABLE[VALUES])
    with pytest.raises(ValueError, match=r"^values is a Derived of torch.float32 on cpu"):
        _native.check_ids(LENGTHS, VALUES.float().as_subclass(Derived), None, 2, [4, 4])
    counts, bad = _native.check_ids(LENGTHS, VALUES.as_subclass(Derived), None, 2, [4, 3])
    assert (counts, bad) == ([3, 1], None)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
def test_rows_apart_are_read_where_they_lie(rows: int, columns: int, left: int, right: int) -> None:
    whole = np.arange((rows + 1) * (left + columns + right), dtype=np.float32)
    whole = whole.reshape(rows + 1, -1)
    part = torch.from_numpy(whole)[1:, left : left + columns]
    data = torch.zeros(max(1, part.nbytes), dtype=torch.uint8)
    assert _native.encode_rows(0, part, data) == part.nbytes
    found = data.numpy()[: part.nbytes].view(np.float32).reshape(rows, columns)
    assert np.array_equal(found, whole[1:, left : left + columns])


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: _native.Tables([(t, False)]),
        lambda t: _native.Buffers.whole([t]),
        lambda t: _native.Buffers.split(t, [t.nbytes]),
        frame_of,
    ],
    ids=["Tables", "Buffers.whole", "Buffers.split", "Frame"],
)
def test_what_is_made_once_keeps_its_tensors(hold: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.zeros(4, 2)
    kept = weakref.ref(tensor)
    holder = hold(tensor)
    del tensor
    gc.collect()
    assert kept() is not None
    del holder
    gc.collect()
    assert kept() is None


def test_frames_keep_their_equal_rows() -> None:
    coded = _native.CodedFeatures([(0, 2, 0.0, False)])

    def frame() -> _native.Frame:
        equal = _native.EqualBags(None, torch.tensor([5, 7, 5, 5]), [(4, 4, True)])
        return _native.Frame.side_by_side(coded, ROW, 0, 4, 0, equal, [0])

    frames = [frame() for _ in range(50)]
    gc.collect()
    alone = _native.encode_frame(_native.Frame.side_by_side(coded, ROW, 0, 4))
    assert {alone - _native.encode_frame(each) for each in frames} == {2 * 8}  # two rows less
