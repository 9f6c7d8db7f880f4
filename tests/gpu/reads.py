"""A reader over two generations of float tables, against native code on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.shared_rows import Batch, numbers, same_bits
from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import GpuReader, RegisteredTables
from torchrec_bls.direct.gpu.report import BadId
from torchrec_bls.direct.layout import Shard, TableLayout

_BLOCKS = tuple(Shard(owner, 4 * owner, rows, 0, 12) for owner, rows in enumerate((4, 4, 1)))
_PIECES = (Shard(0, 0, 5, 0, 4), Shard(1, 0, 5, 4, 8))
LAYOUTS = {
    "rows": TableLayout("rows", 9, 12, "FP32", _BLOCKS),
    "columns": TableLayout("columns", 5, 12, "FP32", _PIECES),
}
_OWNERS = 3
_PAGE = 4096
POOLED = [FeatureLookup(1, "rows", 0), FeatureLookup(0, "columns", 12, True)]
COPIED = [FeatureLookup(1, "rows"), FeatureLookup(0, "columns"), FeatureLookup(1, "rows")]


def generation_of(serial: int) -> FloatGeneration:
    """A version of the two tables, with a segment for each of three owners."""
    generator = torch.Generator().manual_seed(serial)
    first: int = _native.FIRST_TABLE_OFFSET
    places: dict[tuple[str, Shard], int] = {}
    pages = []
    for owner in range(_OWNERS):
        parts, at = [], 0
        for layout in LAYOUTS.values():
            for shard in layout.shards:
                if shard.owner == owner:
                    parts.append((numbers(generator, shard.rows, shard.columns), first + at))
                    places[layout.name, shard] = owner * _PAGE + at
                    at += 4 * shard.rows * shard.columns
        label = (owner, str(serial), bytes(32))
        segment = _native.TableSegment.create(label, parts, first + at, False)
        pages.append((segment, first, _PAGE))
    return FloatGeneration(str(serial), serial, [], pages, None, places, LAYOUTS, 4)


def check_reads(gpu: Gpu) -> None:
    """Reads by `gpu` have the bits of native code in each generation, sums and rows."""
    generations = [generation_of(serial) for serial in (1, 2)]
    batch = Batch.random(torch.Generator().manual_seed(0), [5, 9], 4, 3, True, torch.int64)
    tables = RegisteredTables(gpu, generations[0])
    assert _rights_at(tables.address) == {"r--s"}, "the driver copies private pages"
    pooled = GpuReader(gpu, tables, POOLED, True, programs=2)
    copied = GpuReader(gpu, tables, COPIED, False, programs=2)
    for number, generation in enumerate(generations):
        if number:
            tables = RegisteredTables(gpu, generation)
            formers = {reader.move_to(tables) for reader in (pooled, copied)}
            for former in formers:
                former.registration.close()
        _check_sums(gpu, pooled, generation, batch)
        _check_rows(gpu, copied, generation, batch)
    bad = batch.ids.clone()
    bad[0] = 99
    out = torch.empty(_rows_of(batch), 12, device=gpu.device)
    launch = copied.copy_rows(bad.to(gpu.device), batch.begins.to(gpu.device), out)
    assert launch.bad_id() == BadId(0, 0, 99)
    tables.registration.close()


def _check_sums(gpu: Gpu, reader: GpuReader, generation: FloatGeneration, batch: Batch) -> None:
    expected = torch.full((4, 24), 7.0)
    owners = torch.zeros(_OWNERS, dtype=torch.int64)
    _native.sum_rows_directly(
        generation.features(POOLED),
        batch.lengths,
        batch.ids,
        batch.weights,
        batch.samples,
        batch.counts,
        owners,
        expected,
    )
    assert batch.weights is not None
    ids, offsets, weights, out = (
        tensor.to(gpu.device)
        for tensor in (batch.ids, batch.offsets, batch.weights, torch.full((4, 24), 7.0))
    )
    assert reader.sum_rows(ids, offsets, weights, out).bad_id() is None
    assert same_bits(out.cpu(), expected)


def _check_rows(gpu: Gpu, reader: GpuReader, generation: FloatGeneration, batch: Batch) -> None:
    expected = torch.full((_rows_of(batch), 12), 7.0)
    owners = torch.zeros(_OWNERS, dtype=torch.int64)
    features = generation.features(COPIED)
    _native.copy_rows_directly(features, batch.ids, batch.counts, owners, expected)
    out = torch.full_like(expected, 7.0, device=gpu.device)
    launch = reader.copy_rows(batch.ids.to(gpu.device), batch.begins.to(gpu.device), out)
    assert launch.bad_id() is None
    assert same_bits(out.cpu(), expected)


def _rows_of(batch: Batch) -> int:
    return sum(batch.counts[lookup.key] for lookup in COPIED)


def _rights_at(address: int) -> set[str]:
    """How the pages of the segments are mapped, which lie side by side."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights = line.split()[:2]
        first, _ = (int(each, 16) for each in place.split("-"))
        if address <= first < address + _OWNERS * _PAGE:
            found.add(rights)
    return found
