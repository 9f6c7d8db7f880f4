"""The torch.distributed backend bls against gloo: all-to-all, and unmodified TorchRec over it."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.exchange import alltoall
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import in_turns
from benchmarks.modules.models import Case, ids_of, samplers, torchrec_forward
from benchmarks.modules.page import backend_section

FULL = {"ranks": [2, 4, 8], "sizes": [8, 4096, 32 << 10, 256 << 10, 4 << 20], "turns": 3}
FULL |= {"seconds": 0.15, "torchrec_ranks": [2, 4], "samples": 9}
QUICK = {"ranks": [2], "sizes": [8, 4 << 20], "turns": 1}
QUICK |= {"seconds": 0.1, "torchrec_ranks": [2], "samples": 3}
BACKENDS = ("bls", "gloo")
SHARDINGS = ("table_wise", "row_wise", "column_wise")


def measure_alltoall(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns for each number of ranks, size and mode the turns of both backends."""
    return [
        {"ranks": cell["ranks"], "size": cell["bytes_per_pair"], "mode": cell["mode"]}
        | {backend: cell["peers"][backend]["us_per_call"] for backend in BACKENDS}
        for cell in alltoall.measure(settings, BACKENDS)
    ]


def measure_torchrec(rank: int, ranks: int, samples: int) -> list[dict[str, Any]]:
    """Returns for each module and sharding the ms of a forward over both backends, and "free":
    bls without moving any rows. That is what TorchRec itself takes, a backend's best."""
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    results = []
    with torch.no_grad():
        for module, sharding in itertools.product(("EC", "EBC"), SHARDINGS):
            case = Case(module, sharding, ranks, 512)
            ids = ids_of(case, rank)
            forwards = {name: torchrec_forward(case, group) for name, group in groups.items()}
            for _ in range(3):
                if not torch.equal(*(_rows(forward(ids)) for forward in forwards.values())):
                    raise RuntimeError("TorchRec computes something else over bls than over gloo")
            calls = {name: partial(forward, ids) for name, forward in forwards.items()}
            timed = samplers({name: lambda _, call=call: call for name, call in calls.items()})
            timed["free"] = _without_rows(timed["bls"])
            results.append({**case._asdict(), **in_turns(timed, samples)})
    return results


def _without_rows(sampler: Callable[[], float]) -> Callable[[], float]:
    """The sampler without the exchanges of floats, which have all sizes and no data."""
    done = mock.Mock()

    def unless_rows(function: Any) -> Any:
        def call(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if output.dtype == torch.float32:
                return done
            return function(output, *arguments, **options)

        return call

    names = ("all_to_all_single", "reduce_scatter_tensor")
    instead = {name: unless_rows(getattr(dist, name)) for name in names}
    return mock.patch.multiple(dist, **instead)(sampler)


def _rows(output: Any) -> torch.Tensor:
    """All values of a KeyedTensor, or of the jagged tensors of an EmbeddingCollection."""
    values = output.values()
    if isinstance(values, torch.Tensor):
        return values
    return torch.cat([jagged.values() for jagged in values])


def main() -> None:
    arguments = record.parser(__doc__, quick="fewer ranks, sizes and turns").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = {"alltoall": measure_alltoall(settings), "torchrec": []}
    for ranks in tqdm(settings["torchrec_ranks"], desc="TorchRec"):
        results["torchrec"] += on_ranks(ranks, measure_torchrec, ranks, settings["samples"])
    record.publish(arguments.json, "backend", before, settings, results, backend_section)


if __name__ == "__main__":
    main()
