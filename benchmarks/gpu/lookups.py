"""How long lookups take whose outputs are on a GPU, by us and by those who do the same job."""

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import (
    GPU,
    HOST,
    LookUp,
    Tables,
    drawn,
    fbgemm,
    group,
    pinned_copy_of,
    sharded,
    values_of,
)
from benchmarks.gpu.runtime import Runtime
from benchmarks.harness.statistics import Spread, taking_turns

OURS, STAGED, PAGEABLE = "read by the GPU", "staged", "read by the CPU, pageable copy"
PINNED, UNSHARDED = "read by the CPU, pinned copy", "TorchRec on all threads, copy"
LIMIT = "pinned copy of as many bytes"
#: FBGEMM's peers, by where their tables are.
FBGEMM = {
    "FBGEMM, HBM": "DEVICE",
    "FBGEMM, UVM": "MANAGED",
    "FBGEMM, UVM caching": "MANAGED_CACHING",
}
# Those whose sums are in the CPU's order have its bits; others may differ by their rounding.
_SAME_BITS = (OURS, STAGED, PAGEABLE, PINNED, UNSHARDED)


def measure(
    runtime: Runtime,
    rows: int,
    dim: int,
    stored: str,
    cells: Sequence[tuple[int, int, str]],
    turns: int,
) -> Iterator[dict[str, Any]]:
    """Looks fresh batches up, by all in turn, each of which has the GPU for itself.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        stored: see Tables.
        cells: samples of a batch, ids of a feature and sample, and their law.
        turns: lookups of each cell.

    Yields:
        A result for each cell and peer: us of a lookup from the call to the end of all that the GPU
        does, and how many numbers of a batch are wrong. Or why there is no such peer.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tables = Tables(rows, dim, stored)
    with group(), torch.no_grad():
        peers, lacking = _peers(runtime, tables)
        yield from ({"what": name, "lacks": why} for name, why in lacking.items())
        for batch, ids, law in cells:
            cell = {"batch": batch, "ids": ids, "law": law}
            batches = [drawn(tables, batch, ids, law, seed) for seed in range(turns + 1)]
            moved = batch * ids * len(batches[0].keys()) * tables.row_bytes
            here = {**peers, LIMIT: _limit(runtime, moved)}
            expected = peers[PAGEABLE](batches[0]).cpu()
            wrong = {
                name: _wrong(name, look_up(batches[0]).cpu(), expected)
                for name, look_up in here.items()
                if name != LIMIT
            }
            samplers = {
                name: partial(_sample, runtime, look_up, iter(batches[1:]))
                for name, look_up in here.items()
            }
            for name, us in taking_turns(samplers, turns).items():
                found = {"wrong_numbers": wrong[name]} if name in wrong else {}
                yield {"what": name, **cell, "bytes": moved, "us": Spread(us), **found}


def _peers(runtime: Runtime, tables: Tables) -> tuple[dict[str, LookUp], dict[str, str]]:
    """Who can look tables up here, and why others can't."""
    model, device = tables.module(), runtime.device
    made: dict[str, LookUp] = {}
    lacking: dict[str, str] = {}
    if tables.stored == "float":
        for name, location in FBGEMM.items():
            try:
                made[name] = fbgemm(tables, location, model.bags, device)
            except Exception as error:  # a build without kernels, or too little memory
                lacking[name] = f"{type(error).__name__}: {error}"
    # Sharding may take the weights of what it is given.
    by_gpu, staged, by_cpu = (
        sharded(tables.module(), lookup, place)
        for lookup, place in (("direct", GPU), ("exchange", GPU), ("direct", HOST))
    )
    made[OURS] = partial(values_of, by_gpu)
    made[STAGED] = partial(values_of, staged)
    made[PAGEABLE] = lambda features: values_of(by_cpu, features).to(device)
    made[PINNED] = lambda features: pinned_copy_of(values_of(by_cpu, features), device)
    made[UNSHARDED] = lambda features: values_of(model, features).to(device)
    return made, lacking


def _limit(runtime: Runtime, moved: int) -> LookUp:
    source = runtime.pinned(moved // 8)
    target = torch.empty_like(source, device=runtime.device)
    return lambda _: target.copy_(source, non_blocking=True)


def _sample(runtime: Runtime, look_up: LookUp, batches: Iterator[Any]) -> float:
    features = next(batches)
    runtime.synchronize()
    begin = time.perf_counter()
    look_up(features)
    runtime.synchronize()
    return 1e6 * (time.perf_counter() - begin)


def _wrong(name: str, found: torch.Tensor, expected: torch.Tensor) -> int:
    if name in _SAME_BITS:
        return int((found.view(torch.int32) != expected.view(torch.int32)).sum())
    return int((~torch.isclose(found, expected, rtol=1e-5, atol=1e-6)).sum())
