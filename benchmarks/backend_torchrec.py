"""Unmodified TorchRec over the backends bls and gloo: forward of sharded modules, in turn."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import spread
from embedding import slowest
from embedding_models import Case, build_torchrec, ids_of
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

BACKENDS = ("bls", "gloo")
# bls without moving any rows: what TorchRec itself takes, which is the best that a backend can do.
FREE = "free"
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
            times: dict[str, list[float]] = {name: [] for name in (*BACKENDS, FREE)}
            for _ in range(samples):
                for name, samples_ms in times.items():
                    with _without_rows() if name == FREE else nullcontext():
                        samples_ms.append(slowest(forwards.get(name, forwards["bls"])))
            results.append({**asdict(case), **{name: spread(ms) for name, ms in times.items()}})
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _without_rows() -> Iterator[None]:
    """Leaves out the exchanges of floats, which have all sizes and no data."""
    done = mock.Mock()

    def unless_rows(function: Any) -> Any:
        def call(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if output.dtype == torch.float32:
                return done
            return function(output, *arguments, **options)

        return call

    functions = {
        name: getattr(dist, name) for name in ("all_to_all_single", "reduce_scatter_tensor")
    }
    with mock.patch.multiple(dist, **{n: unless_rows(f) for n, f in functions.items()}):
        yield


def _values(output: Any) -> list[torch.Tensor]:
    if isinstance(output, KeyedTensor):
        return [output.values()]
    jagged: Sequence[JaggedTensor] = list(output.values())
    return [tensor.values() for tensor in jagged]


def _require_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    if not all(map(torch.equal, found, expected)):
        raise RuntimeError("TorchRec computes something else over bls than over gloo")
