"""The kernels in Triton's interpreter, against the CPU's lookups.

    TRITON_INTERPRET=1 python -m tests.gpu.interpreted CHECK...

The interpreter is chosen when kernels are decorated, hence a process of its own. It runs one
program after the other, and says nothing of speed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu import interpreter
from tests.gpu.fake_cuda import FakeGpu
from tests.gpu.reads import check_reads
from tests.gpu.shared_rows import Batch, CutTable, Looked, Lookup, Memory, numbers, same_bits
from torchrec_bls import _native
from torchrec_bls.direct.gpu.kernels import rows as kernel_rows
from torchrec_bls.direct.gpu.kernels.sequences import copy_rows, decode_rows
from torchrec_bls.direct.gpu.kernels.sums import sum_bags
from torchrec_bls.direct.gpu.report import BadId, first_bad_id, new_report
from torchrec_bls.direct.gpu.strips import Strip, Strips
from torchrec_bls.doctor.gpu_reads import read_rows

CPU = torch.device("cpu")

interpreter.prepare()
KEYS = 3
# Sizes of tiles: rows of a batch are in several, or all in one.
TILES = (32, 256, 4096)

untimed = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
seeds = st.integers(0, 2**31)
ids_dtypes = st.sampled_from([torch.int32, torch.int64])
programs = st.integers(1, 5)
gaps = st.sampled_from([0, 4, 8, 16])


@st.composite
def widths(draw: Any) -> list[int]:
    """Columns of one to three pieces."""
    return draw(st.lists(st.sampled_from([1, 3, 4, 8, 12, 20]), min_size=1, max_size=3))


def tables_of(
    generator: torch.Generator, shapes: list[tuple[int, list[int], int]], dtype: torch.dtype
) -> list[CutTable]:
    return [
        CutTable(numbers(generator, rows, sum(each)).to(dtype), each, blocks)
        for rows, each, blocks in shapes
    ]


shapes = st.lists(
    st.tuples(st.integers(1, 30), widths(), st.integers(1, 4)), min_size=1, max_size=2
)
looked_up = st.lists(
    st.tuples(st.integers(0, KEYS - 1), st.integers(0, 1), st.booleans()), min_size=1, max_size=4
)


def looked_of(drawn: list[tuple[int, int, bool]], tables: list[CutTable]) -> list[Looked]:
    return [Looked(key, table % len(tables), means) for key, table, means in drawn]


def rows_of(looked: list[Looked], tables: list[CutTable]) -> list[int]:
    """The number of ids of each key that all of its tables have rows for."""
    return [
        min([len(tables[each.table].weights) for each in looked if each.key == key], default=7)
        for key in range(KEYS)
    ]


def summed_by_the_cpu(lookup: Lookup, batch: Batch) -> torch.Tensor:
    out = torch.full((batch.samples, lookup.columns), 7.0)
    owners = torch.zeros(4, dtype=torch.int64)
    _native.sum_rows_directly(
        lookup.features,
        batch.lengths,
        batch.ids,
        batch.weights,
        batch.samples,
        batch.counts,
        owners,
        out,
    )
    return out


def summed_by_the_kernel(
    strips: Strips, batch: Batch, columns: int, count: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, BadId | None]:
    # A row more than there are samples, and a column more than there are strips.
    out = torch.full((batch.samples + 1, columns + 1), 7.0, dtype=dtype)
    report = new_report(count, CPU)
    offsets = batch.offsets.to(batch.ids.dtype)
    sum_bags(strips, batch.ids, offsets, batch.weights, out[: batch.samples], report)
    assert (out[batch.samples] == 7).all() and (out[:, columns] == 7).all(), "written past the end"
    return out[: batch.samples, :columns].contiguous(), first_bad_id(report)


@untimed
@given(
    seeds,
    shapes,
    looked_up,
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
    ids_dtypes,
    programs,
    gaps,
    st.sampled_from(TILES),
)
def sums(
    seed: int,
    drawn: list[tuple[int, list[int], int]],
    features: list[tuple[int, int, bool]],
    samples: int,
    weighted: bool,
    vanishing: bool,
    dtype: torch.dtype,
    count: int,
    gap: int,
    tile: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = tables_of(generator, drawn, torch.float32)
    looked = looked_of(features, tables)
    lookup = Lookup(tables, looked, gap, 4, pooled=True)
    batch = Batch.random(generator, rows_of(looked, tables), samples, 4, weighted, dtype)
    if vanishing and batch.weights is not None:
        batch.weights *= 1e-44  # products are 0.0 and -0.0, and so are sums
    strips = Strips(lookup.strips, 32, CPU)
    with patch.object(kernel_rows, "_NUMBERS_AT_ONCE", tile):
        found, bad = summed_by_the_kernel(strips, batch, lookup.columns, count)
    assert bad is None
    assert same_bits(found, summed_by_the_cpu(lookup, batch))


@untimed
@given(
    seeds,
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=2),
    widths(),
    looked_up,
    st.integers(0, 9),
    ids_dtypes,
    st.sampled_from([torch.float32, torch.float16]),
    programs,
    st.sampled_from(TILES),
)
def copies(
    seed: int,
    drawn: list[tuple[int, int]],
    columns: list[int],
    features: list[tuple[int, int, bool]],
    samples: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    count: int,
    tile: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    if weights_dtype is torch.float16:
        columns = [2 * each for each in columns]  # rows are of whole words
    tables = tables_of(generator, [(rows, columns, n) for rows, n in drawn], weights_dtype)
    looked = looked_of(features, tables)
    lookup = Lookup(tables, looked, 0, 4, pooled=False)
    batch = Batch.random(generator, rows_of(looked, tables), samples, 4, False, dtype)
    counts = [batch.counts[each.key] for each in looked]
    expected = torch.full((sum(counts), sum(columns)), 7.0, dtype=weights_dtype)
    owners = torch.zeros(4, dtype=torch.int64)
    _native.copy_rows_directly(lookup.features, batch.ids, batch.counts, owners, expected)
    out = torch.full((sum(counts) + 1, sum(columns)), 7.0, dtype=weights_dtype)
    strips = Strips(lookup.strips, 32, CPU)
    report = new_report(count, CPU)
    out_begins = begins_of(counts, len(columns))
    with patch.object(kernel_rows, "_NUMBERS_AT_ONCE", tile):
        copy_rows(strips, batch.ids, batch.begins, out_begins, out.view(torch.int32), report)
    assert first_bad_id(report) is None
    assert same_bits(out[:-1], expected)
    assert (out[-1] == 7).all(), "written past the end"


def begins_of(counts: list[int], strips_of_each: int) -> torch.Tensor:
    """Where the output of each strip begins."""
    begins = torch.tensor([0, *counts]).cumsum(0)[:-1]
    return begins.repeat_interleave(strips_of_each)


@untimed
@given(seeds, shapes, looked_up, st.integers(1, 9), st.integers(1, 4), programs, st.data())
def bad_ids(
    seed: int,
    drawn: list[tuple[int, list[int], int]],
    features: list[tuple[int, int, bool]],
    samples: int,
    bad: int,
    count: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = tables_of(generator, drawn, torch.float32)
    looked = looked_of(features, tables)
    lookup = Lookup(tables, looked, 0, 4, pooled=True)
    good = Batch.random(generator, rows_of(looked, tables), samples, 4, False, torch.int64)
    ids = good.ids.clone()
    for _ in range(bad if len(ids) else 0):
        place = data.draw(st.integers(0, len(ids) - 1))
        # Of a table with fewer rows, or of none.
        ends = [len(table.weights) for table in tables]
        ids[place] = data.draw(st.sampled_from([*ends, -1, 2**40, -(2**63), 2**63 - 1]))
    mended = ids.clone()
    first = BadId(-1, 1 << 62, 0)
    expected_nan = torch.zeros(samples, lookup.columns, dtype=torch.bool)
    column = 0
    for each in looked:
        table = tables[each.table]
        for bag in range(samples):
            place = each.key * samples + bag
            for position in range(int(good.offsets[place]), int(good.offsets[place + 1])):
                if not 0 <= int(ids[position]) < len(table.weights):
                    mended[position] = 0
                    expected_nan[bag, column : column + sum(table.widths)] = True
                    if position < first.position:
                        first = BadId(each.key, position, int(ids[position]))
        column += sum(table.widths)
    batch = Batch(samples, good.lengths, ids, None, good.counts)
    with patch.object(kernel_rows, "_NUMBERS_AT_ONCE", 32):
        found, told = summed_by_the_kernel(
            Strips(lookup.strips, 32, CPU), batch, lookup.columns, count
        )
    assert told == (first if first.key >= 0 else None)
    assert torch.equal(found.isnan(), expected_nan)
    # An id that one table has a row for and another one not is 0 for both here.
    kept = ~expected_nan & same_ids(looked, tables, good, ids, mended, lookup.columns)
    by_the_cpu = summed_by_the_cpu(lookup, Batch(samples, good.lengths, mended, None, good.counts))
    assert same_bits(found[kept], by_the_cpu[kept])


def same_ids(
    looked: list[Looked],
    tables: list[CutTable],
    batch: Batch,
    ids: torch.Tensor,
    mended: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """Which numbers of the output come from bags that were not mended, [samples, columns]."""
    same = torch.ones(batch.samples, columns, dtype=torch.bool)
    column = 0
    for each in looked:
        width = sum(tables[each.table].widths)
        for bag in range(batch.samples):
            place = each.key * batch.samples + bag
            begin, end = int(batch.offsets[place]), int(batch.offsets[place + 1])
            if not torch.equal(ids[begin:end], mended[begin:end]):
                same[bag, column : column + width] = False
        column += width
    return same


def nothing_is_read_beside_tables() -> None:
    """Pages that nobody may read lie around a table, whose last block is short."""
    rows, row_bytes = 64, 64
    memory = mmap.mmap(-1, 3 * 4096)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    whole.fill_(1.0)
    address = whole.data_ptr() + 4096
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (address - 4096, address + 4096):
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 0) == 0
    blocks = [address, address + 40 * row_bytes]
    strips = Strips([Strip(0, 0, 16, row_bytes, rows, 40, False, blocks)], 32, CPU)
    ids = torch.tensor([0, 63, 64, 79, -1, 80, 2**40, -(2**63)])
    bags = torch.arange(len(ids) + 1)
    report = new_report(2, CPU)
    for read in ("sums", "rows"):
        out = torch.zeros(len(ids), 16)
        if read == "sums":
            sum_bags(strips, ids, bags, None, out, report)
        else:
            begins, first = torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int64)
            copy_rows(strips, ids, begins, first, out.view(torch.int32), report)
        assert (out[:2] == 1).all() and out[2:].isnan().all()
        assert first_bad_id(report) == BadId(0, 2, 64)


def lengths_that_do_not_fit() -> None:
    """Bags outside of the ids are NaN, and nothing outside of the ids and the output is touched."""
    table = torch.ones(9, 4)
    pooled, rows = (
        Strips(
            [Strip(key, column, 4, 16, 9, 9, False, [table.data_ptr()]) for key, column in each],
            32,
            CPU,
        )
        for each in ([(0, 0), (1, 4)], [(0, 0), (1, 0)])
    )
    ids = torch.arange(10)[:6]  # the ids behind them have rows
    report = new_report(2, CPU)
    for offsets, bad_bags in (
        ([0, 2, 4, 5, 7], [[0, 0], [0, 1]]),
        ([0, 2, -1, 5, 6], [[0, 1], [1, 0]]),
        ([0, 3, 2, 5, 1 << 40], [[0, 0], [1, 1]]),
        ([0, 3, 3, 3, 6], [[0, 0], [0, 0]]),
    ):
        out = torch.zeros(2, 8)
        sum_bags(pooled, ids, torch.tensor(offsets), None, out, report)
        assert out.view(2, 2, 4).isnan().all(2).int().tolist() == bad_bags, (offsets, out)
        told = first_bad_id(report)
        assert (told is not None) == any(map(any, bad_bags))
        assert told is None or (told.position, told.id) == (6, 0)
    for begins, out_begins, expected in (
        ([0, 3, 6], [0, 3], BadId(-1, 0, 0)),
        ([0, 3, 7], [0, 3], BadId(1, 6, 0)),
        ([-1, 3, 6], [0, 3], BadId(0, 6, 0)),
        ([0, 3, 6], [0, 4], BadId(1, 6, 0)),
        ([0, 3, 6], [-1, 3], BadId(0, 6, 0)),
    ):
        out = torch.zeros(8, 4)
        words = out[1:7].view(torch.int32)
        copy_rows(rows, ids, torch.tensor(begins), torch.tensor(out_begins), words, report)
        assert first_bad_id(report) == (expected if expected.key >= 0 else None)
        written = [expected.key != key for key in (0, 1) for _ in range(3)]
        assert out.all(1).tolist() == [False, *written, False], (begins, out)


@untimed
@given(seeds, st.integers(0, 9), st.integers(1, 4), programs)
def bad_ids_of_sequences(seed: int, samples: int, blocks: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = tables_of(generator, [(11, [4, 8], blocks)], torch.float32)
    looked = [Looked(2, 0), Looked(0, 0)]
    lookup = Lookup(tables, looked, 0, 4, pooled=False)
    batch = Batch.random(generator, [22, 5, 22], samples, 4, False, torch.int64)
    is_bad = batch.ids > 10
    is_bad[int(batch.begins[1]) : int(batch.begins[2])] = False  # nobody looks these up
    strips = Strips(lookup.strips, 32, CPU)
    report = new_report(count, CPU)
    counts = [batch.counts[each.key] for each in looked]
    out = torch.full((sum(counts), 12), 7.0)
    with patch.object(kernel_rows, "_NUMBERS_AT_ONCE", 64):
        copy_rows(
            strips, batch.ids, batch.begins, begins_of(counts, 2), out.view(torch.int32), report
        )
    places = torch.cat(
        [torch.arange(len(batch.ids)).split(batch.counts)[each.key] for each in looked]
    )
    expected = tables[0].weights[batch.ids[places].clamp(max=10)]
    expected[is_bad[places]] = float("nan")
    assert same_bits(out, expected)
    told = first_bad_id(report)
    if not is_bad.any():
        assert told is None
    else:
        position = int(is_bad.nonzero()[0])
        key = 0 if position < int(batch.begins[1]) else 2
        assert told == BadId(key, position, int(batch.ids[position]))


@untimed
@given(
    seeds,
    st.sampled_from([2, 4, 8, 16, 32]),
    st.sampled_from(["sum", "mean", "rows"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float16]),
    programs,
    st.sampled_from(TILES),
)
def stored(
    seed: int,
    bits: int,
    kind: str,
    weighted: bool,
    drawn: list[tuple[int, int]],
    samples: int,
    out_dtype: torch.dtype,
    count: int,
    tile: int,
) -> None:
    """Rows as FBGEMM stores them, against its own kernels on the CPU."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
        rounded_row_size_in_bytes,
    )

    generator = torch.Generator().manual_seed(seed)
    types = {2: SparseType.INT2, 4: SparseType.INT4, 8: SparseType.INT8}
    weights_type = types.get(bits) or (SparseType.FP16 if bits == 16 else SparseType.FP32)
    dims = [8 * (drawn[0][1] if kind == "rows" else eighths) for _, eighths in drawn]
    lookup = IntNBitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            ("", rows, dim, weights_type, EmbeddingLocation.HOST)
            for (rows, _), dim in zip(drawn, dims, strict=True)
        ],
        pooling_mode={"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}.get(kind, PoolingMode.NONE),
        device="cpu",
        bounds_check_mode=BoundsCheckMode.NONE,
        output_dtype=SparseType.FP16 if out_dtype is torch.float16 else SparseType.FP32,
        row_alignment=16,
    )
    whole = torch.zeros(lookup.host_size, dtype=torch.uint8)
    strips = []
    for table, ((rows, _), dim, begin) in enumerate(
        zip(drawn, dims, lookup.weights_physical_offsets, strict=True)
    ):
        row_bytes = rounded_row_size_in_bytes(dim, weights_type, 16)
        stored_rows = whole[begin : begin + rows * row_bytes].view(rows, row_bytes)
        random = torch.randint(256, (rows, row_bytes), generator=generator, dtype=torch.uint8)
        stored_rows.copy_(random)
        if bits == 32:
            stored_rows[:, : 4 * dim] = numbers(generator, rows, dim).view(torch.uint8)
        else:
            # Scale and shift, or the row itself.
            halves = numbers(generator, rows, dim if bits == 16 else 2).clamp(-100, 100).half()
            stored_rows[:, : 2 * halves.shape[1]] = halves.view(torch.uint8)
        column = 0 if kind == "rows" else sum(dims[:table])
        strips.append(Strip(table, column, dim, row_bytes, rows, rows, kind == "mean", [begin]))
    memory = Memory([whole], 0)
    strips = [replace(each, blocks=[memory.address + each.blocks[0]]) for each in strips]
    lookup.weights_host = torch.frombuffer(memory.window, dtype=torch.uint8)[: len(whole)]
    lookup.weight_initialized = True
    lookup.initialize_logical_weights_placements_and_offsets()
    weighted &= kind != "rows"
    rows_of_keys = [rows for rows, _ in drawn]
    batch = Batch.random(generator, rows_of_keys, samples, 4, weighted, torch.int64)
    expected = lookup(batch.ids, batch.offsets, batch.weights)
    on_cpu = Strips(strips, bits, CPU)
    with patch.object(kernel_rows, "_NUMBERS_AT_ONCE", tile):
        if kind == "rows":
            found = torch.full((len(batch.ids), dims[0]), 7.0, dtype=out_dtype)
            report = new_report(count, CPU)
            decode_rows(on_cpu, batch.ids, batch.begins, batch.begins[:-1], found, report)
            bad = first_bad_id(report)
        else:
            found, bad = summed_by_the_kernel(on_cpu, batch, sum(dims), count, out_dtype)
    assert bad is None
    assert same_bits(found, expected)


def moved() -> None:
    """Addresses are read at each launch: other tables, without another argument."""
    generator = torch.Generator().manual_seed(0)
    looked = [Looked(0, 0), Looked(1, 1)]
    shapes = [(9, [4, 8], 2), (5, [12], 1)]
    versions = [
        Lookup(tables_of(generator, shapes, torch.float32), looked, 0, 4, pooled=True)
        for _ in range(2)
    ]
    batch = Batch.random(generator, [9, 5, 1], 6, 3, False, torch.int64)
    strips = Strips(versions[0].strips, 32, CPU)
    for version in (0, 1, 0):
        strips.move_to([at for strip in versions[version].strips for at in strip.blocks])
        found, _ = summed_by_the_kernel(strips, batch, versions[version].columns, 2)
        assert same_bits(found, summed_by_the_cpu(versions[version], batch))


def reader() -> None:
    """A reader has the bits of native code, and memory is unregistered when all has read it."""
    gpu = FakeGpu()
    check_reads(gpu)
    trace = " ".join(each for each in gpu.cuda.trace if each != "read")
    assert trace.count("register") == 12 and trace.count("unregister") == 6
    assert trace.count("synchronize unregister unregister unregister") == 2, trace
    assert not gpu.cuda.registered


def doctor() -> None:
    """The doctor's program passes, and finds a row with other bytes."""
    gpu = FakeGpu()
    read_rows(gpu)
    assert gpu.cuda.trace[-1] == "unregister" and not gpu.cuda.registered

    class Broken(FakeGpu):
        def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone().index_fill_(0, torch.tensor([len(tensor) // 2]), 0)

    try:
        read_rows(Broken())
    except ValueError as error:
        assert "with other bytes" in str(error)
    else:
        raise AssertionError("a wrong row was not found")


CHECKS = {
    check.__name__: check
    for check in (
        sums,
        copies,
        bad_ids,
        bad_ids_of_sequences,
        nothing_is_read_beside_tables,
        lengths_that_do_not_fit,
        stored,
        moved,
        reader,
        doctor,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(f"{name}: as the CPU")
