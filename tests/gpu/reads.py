"""A reader over two generations of float tables, against native code on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.shared_rows import Batch, numbers, same_bits
from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import GpuReader
from torchrec_bls.direct.gpu.report import BadId
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.reads.tables_view import strips_of

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
    for generation in generations:
        generation.register_with(gpu)
    assert generations[0].registered is not None
    assert _rights_at(generations[0].registered.address) == {"r--s"}, "the driver copies pages"
    pooled, copied = (
        GpuReader(
            gpu,
            generations[0].registered,
            strips_of(generations[0], lookups, is_pooled),
            32,
        )
        for lookups, is_pooled in ((POOLED, True), (COPIED, False))
    )
    # A thread that began before a switch goes on in the former version.
    for generation in (generations[0], generations[1], generations[0], generations[1]):
        _check_sums(gpu, pooled, generation, batch)
        _check_rows(gpu, copied, generation, batch)
    bad = batch.ids.clone()
    bad[0] = 99
    out = torch.empty(_rows_of(batch), 12, device=gpu.device)
    assert generations[1].registered is not None
    launch = copied.copy_rows(
        generations[1].registered, bad.to(gpu.device), batch.begins.to(gpu.device), out
    )
    assert launch.bad_id() == BadId(0, 0, 99)


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
    assert generation.registered is not None
    launch = reader.sum_rows(generation.registered, ids, offsets, weights, out)
    assert launch.bad_id() is None
    assert same_bits(out.cpu(), expected)


def _check_rows(gpu: Gpu, reader: GpuReader, generation: FloatGeneration, batch: Batch) -> None:
    expected = torch.full((_rows_of(batch), 12), 7.0)
    owners = torch.zeros(_OWNERS, dtype=torch.int64)
    features = generation.features(COPIED)
    _native.copy_rows_directly(features, batch.ids, batch.counts, owners, expected)
    out = torch.full_like(expected, 7.0, device=gpu.device)
    assert generation.registered is not None
    launch = reader.copy_rows(
        generation.registered, batch.ids.to(gpu.device), batch.begins.to(gpu.device), out
    )
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
