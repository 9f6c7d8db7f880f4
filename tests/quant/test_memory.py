"""Shared rows take the memory that they are stored in, once, and outlive their owner."""

import copy
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Batch, SparseOnly, assert_same_bits, flatten
from tests.processes import run, run_outcomes
from tests.quant import models
from torchrec_bls import _native
from torchrec_bls.errors import ProtocolError

ROWS = [30_000, 20_000, 40_000, 10_000]
LABEL = (0, "1", bytes(32))


def test_all_ranks_together_hold_each_row_once() -> None:
    for held, stored in run(3, _bytes_held_and_stored)[0]:
        assert stored <= held <= 1.05 * stored


def _bytes_held_and_stored(rank: int) -> list[tuple[int, int]]:
    sizes: list[tuple[int, int]] = []
    for sharding in ("table_wise", "row_wise"):
        module = models.float_module("ebc", rows=ROWS)
        model = models.quantized(SparseOnly(module), ["int8", "int4", "int2", "fp16"])
        stored = sum(lookup.weights_host.numel() for lookup in model.embeddings._emb_modules)
        sharded = models.shard(model, models.sharder_of("ebc"), sharding).module.embeddings
        generation: Any = sharded.direct_reads.generation
        sizes.append(
            (sum(each.segment.size for part in generation.parts for each in part.pieces), stored)
        )
        # Nothing else is left of the weights: what the module shows lies in the window.
        window = torch.frombuffer(generation.window, dtype=torch.uint8).data_ptr()
        for table in sharded.embedding_bags.values():
            shown = getattr(table.weight, "elem", table.weight)
            assert shown.untyped_storage().data_ptr() == window
    return sizes


def test_rows_cost_page_tables_once() -> None:
    """Lookups read through the window. Segments are mapped for their labels alone."""
    for segments, windows, labels in run(2, _resident):
        assert windows > 1 << 20
        # With the page of a label the kernel maps those around it, 64 KiB together.
        assert segments <= labels * (64 << 10) < windows


def _resident(rank: int) -> tuple[int, int, int]:
    model = models.quantized(
        SparseOnly(models.float_module("ebc", rows=ROWS)), ["int8", "int4", "int2", "fp16"]
    )
    sharded = models.shard(model, models.sharder_of("ebc"), "row_wise")
    assert sharded.module.embeddings.version
    maps = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ r([w-])[^\n]*memfd:torchrec_bls.*?^Rss: +([0-9]+) kB",
        Path("/proc/self/smaps").read_text(),
        re.S | re.M,
    )
    of_kind = [sum(int(size) for kind, size in maps if kind == each) for each in ("-", "w")]
    dist.barrier()
    generation: Any = sharded.module.embeddings.direct_reads.generation
    labels = sum(1 + len(part.pieces) for part in generation.parts)
    return of_kind[0] << 10, of_kind[1] << 10, labels


def test_tables_outlive_their_owner() -> None:
    first, second = run_outcomes(2, _owner_is_killed)
    assert first.error is None and first.value
    assert second.exit_code == -signal.SIGKILL


def _owner_is_killed(rank: int) -> bool:
    model = models.model_of("ebc", ["int8", "int4", "int2", "fp16"])
    unsharded = copy.deepcopy(model)
    sharded = models.shard(model, models.sharder_of("ebc"), "row_wise")
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while _is_running(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for seed in range(3):
        batch = Batch(models.make_ids("ebc", seed, 20))
        with torch.no_grad():
            assert_same_bits(flatten(sharded(batch)), flatten(unsharded(batch)))
    return True


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_window_has_the_pages_of_its_pieces_in_their_order() -> None:
    rows = torch.arange(8192, dtype=torch.int32).view(torch.uint8)
    parts = [(rows, 4096)]
    segment = _native.TableSegment.create(LABEL, parts, 4096 + rows.numel(), False)
    pieces = [(segment, 8192, 8192), (segment, 4096, 4096)]
    window = torch.frombuffer(_native.TableWindow(pieces), dtype=torch.uint8)
    assert torch.equal(window, torch.cat([rows[4096:12288], rows[:4096]]))
    window.zero_()  # of this process alone
    again = torch.frombuffer(_native.TableWindow(pieces), dtype=torch.uint8)
    assert again.any()


@pytest.mark.parametrize(("offset", "size"), [(1, 4096), (4096, 1), (4096, 8192), (12288, 0)])
def test_a_window_has_whole_pages_of_segments(offset: int, size: int) -> None:
    segment = _native.TableSegment.create(LABEL, [], 8192, False)
    with pytest.raises(ValueError, match="no whole pages of 4096 bytes of a segment of 8192 bytes"):
        _native.TableWindow([(segment, offset, size)])


def test_a_segment_of_another_layout_is_not_mapped() -> None:
    segment = _native.TableSegment.create(LABEL, [], 8192, False)
    with pytest.raises(ProtocolError, match="other shards"):
        _native.TableSegment.open(segment.address, (0, "1", bytes([1] * 32)))
