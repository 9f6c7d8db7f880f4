"""Unmodified TorchRec over the backends bls and gloo: forward of sharded modules, in turn."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import spread
from embedding import slowest
from embedding_models import Case, build_torchrec, ids_of
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

BACKENDS = ("bls", "gloo")
BATCH = 512
_SHARDINGS = ("table_wise", "row_wise", "column_wise")


def measure(ranks: int, samples: int) -> list[dict[str, Any]]:
    """Returns for each module and sharding the ms of a forward over both backends."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (folder, ranks, samples), nprocs=ranks)
        results: list[dict[str, Any]] = json.loads((Path(folder) / "results.json").read_text())
    return results


def _measure(rank: int, folder: str, ranks: int, samples: int) -> None:
    torch.set_num_threads(1)
    store = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    results = []
    with torch.no_grad():
        for module, sharding in itertools.product(("EC", "EBC"), _SHARDINGS):
            case = Case(module, sharding, ranks, BATCH)
            ids = ids_of(case, rank)
            forwards = {name: build_torchrec(case, ids, group) for name, group in groups.items()}
            for _ in range(3):
                _require_equal(*(_values(forward()) for forward in forwards.values()))
            times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            for _ in range(samples):
                for backend, forward in forwards.items():
                    times[backend].append(slowest(forward))
            results.append({**asdict(case), **{name: spread(ms) for name, ms in times.items()}})
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _values(output: Any) -> list[torch.Tensor]:
    if isinstance(output, KeyedTensor):
        return [output.values()]
    jagged: Sequence[JaggedTensor] = list(output.values())
    return [tensor.values() for tensor in jagged]


def _require_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    if not all(map(torch.equal, found, expected)):
        raise RuntimeError("TorchRec computes something else over bls than over gloo")
