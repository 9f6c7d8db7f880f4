"""What lookups by a GPU promise besides their time: no wait of the host, little beside dense work,
one copy of the tables, and new versions that nobody notices."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from benchmarks.gpu import memory
from benchmarks.gpu.models import (
    GPU,
    HOST,
    TABLES,
    LookUp,
    Tables,
    drawn,
    fbgemm,
    group,
    sharded,
    values_of,
)
from benchmarks.gpu.runtime import Runtime
from torchrec_bls import CapturedForward, publish, version_of

_BATCHES = 8
# Of a train, with one lookup between them.
_GEMMS = 40


def measure_waits(
    runtime: Runtime, rows: int, dim: int, batch: int, forwards: int
) -> Iterator[dict[str, Any]]:
    """Looks batches up where whatever makes the host wait for the GPU is an error.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        batch: samples of a batch.
        forwards: number of lookups.

    Yields:
        A result for ids on the host, and one for ids on the GPU.
    """
    tables = Tables(rows, dim)
    with group(), torch.no_grad():
        model = sharded(tables.module(), "direct", GPU)
        on_host = [drawn(tables, batch, 1, "uniform", seed) for seed in range(_BATCHES)]
        on_gpu = [runtime.moved(features) for features in on_host]
        for ids, batches in (("on the host", on_host), ("on the GPU", on_gpu)):
            model(batches[0])  # compiles
            runtime.synchronize()
            with runtime.refusing_to_wait():
                for _, features in zip(range(forwards), cycle(batches), strict=False):
                    model(features)
            runtime.synchronize()
            yield {"what": "ids " + ids, "forwards": forwards}


class _Evaluated(nn.Module):
    """A model with a dense part over the pooled rows."""

    def __init__(self, embeddings: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, dense

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.dense(values_of(self.embeddings, features))
        return values


def measure_graphs(
    runtime: Runtime, rows: int, dim: int, batch: int, width: int, replays: int
) -> Iterator[dict[str, Any]]:
    """Replays a forward that was captured in a CUDA graph, beside the same one that was not.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        batch: samples of a batch.
        width: of the hidden layers of the dense part.
        replays: number of replays.

    Yields:
        ms a step of both, and how many answers differ.
    """
    tables = Tables(rows, dim)
    with group(), torch.no_grad():
        dense = _dense(TABLES * dim, width).to(runtime.device)
        model = _Evaluated(sharded(tables.module(), "direct", GPU), dense)
        batches = [
            runtime.moved(drawn(tables, batch, 1, "uniform", seed)) for seed in range(_BATCHES)
        ]
        model(batches[0])  # compiles
        captured = CapturedForward(model, batches[0])
        differ = 0
        for _, features in zip(range(replays), cycle(batches), strict=False):
            differ += not torch.equal(captured(features), model(features))
        ms = {}
        for what, forward in (("captured", captured), ("not_captured", model)):
            runtime.synchronize()
            begin = time.perf_counter()
            for _, features in zip(range(replays), cycle(batches), strict=False):
                forward(features)
            runtime.synchronize()
            ms[f"ms_{what}"] = 1e3 * (time.perf_counter() - begin) / replays
        yield {"what": "replays", "replays": replays, "width": width, **ms, "wrong_rows": differ}


def measure_beside_gemms(
    runtime: Runtime, rows: int, dim: int, batch: int, side: int, turns: int
) -> Iterator[dict[str, Any]]:
    """How much longer a train of GEMMs takes with one lookup among them.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        batch: samples of a batch.
        side: of the GEMM's square matrices, in bfloat16.
        turns: trains.

    Yields:
        The result.
    """
    tables = Tables(rows, dim)
    a, b, c = torch.randn(3, side, side, dtype=torch.bfloat16, device=runtime.device).unbind()
    gemms = [partial(torch.matmul, a, b, out=c)] * _GEMMS
    with group(), torch.no_grad():
        model = sharded(tables.module(), "direct", GPU)
        batches = [drawn(tables, batch, 1, "uniform", seed) for seed in range(turns + 1)]
        model(batches[0])
        runtime.times_us(gemms)  # clocks go up
        alone, beside = [], []
        for features in batches[1:]:
            alone.append(runtime.together_us([], gemms)[1])
            beside.append(runtime.together_us([partial(model, features)], gemms)[1])
    yield {
        "what": f"{_GEMMS} GEMMs",
        "us_alone": statistics.median(alone),
        "gemm_slower": statistics.median(beside) / statistics.median(alone),
    }


def measure_versions(
    runtime: Runtime, rows: int, dim: int, batch: int, seconds: float, versions: int
) -> Iterator[dict[str, Any]]:
    """Looks batches up while new versions are mapped, registered and taken.

    All weights of a version are its number, by which each answer is compared with the version that
    it names.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        batch: samples of a batch.
        seconds: of the lookups before, and after each publication.
        versions: number of publications.

    Yields:
        Times of lookups alone and beside, ms, and how many answers were of two versions. Then what
        one copy takes of the host's memory and of the GPU's.
    """
    tables = Tables(rows, dim)
    gib = rows * TABLES * tables.row_bytes / 2**30
    with group(), torch.no_grad():
        free = runtime.free_hbm()
        model = sharded(tables.module(), "direct", GPU)
        batches = [drawn(tables, batch, 1, "uniform", seed) for seed in range(_BATCHES)]
        model(batches[0])
        runtime.synchronize()
        state = {name: torch.ones(rows, dim) for name in _names()}
        publish(model, state, version="1").wait(600.0)
        taken = (free - runtime.free_hbm()) / 2**20
        alone, mixed = _lookups(runtime, model, batches, seconds)
        beside: list[float] = []
        began = time.perf_counter()
        for number in range(2, 2 + versions):
            for weights in state.values():
                weights.fill_(float(number))
            publishing = publish(model, state, version=str(number))
            spent, wrong = _lookups(runtime, model, batches, seconds)
            beside += spent
            mixed += wrong
            publishing.wait(600.0)
        yield {
            "what": "lookups, and new versions beside them",
            "gib": gib,
            "versions": versions,
            "s_per_version": (time.perf_counter() - began) / versions,
            "p99_ms_alone": float(np.percentile(alone, 99)),
            "p99_ms_beside": float(np.percentile(beside, 99)),
            "lookups": len(alone) + len(beside),
            "wrong_rows": mixed,
        }
        yield {
            "what": "memory of one copy",
            "gib": gib,
            "hbm_mib_per_gib": taken / gib,
            **memory.memory_kib(),
            **memory.host_kib(),
        }


def _names() -> list[str]:
    return [f"bags.embedding_bags.t{table}.weight" for table in range(TABLES)]


def _lookups(
    runtime: Runtime, model: Any, batches: Sequence[Any], seconds: float
) -> tuple[list[float], int]:
    """ms of each lookup for so many seconds, and how many were not of the version they name."""
    spent, mixed = [], 0
    end = time.perf_counter() + seconds
    for features in cycle(batches):
        begin = time.perf_counter()
        if begin >= end:
            break
        values = values_of(model, features)
        runtime.synchronize()
        spent.append(1e3 * (time.perf_counter() - begin))
        mixed += not bool((values == float(version_of(model))).all())
    return spent, mixed


def measure_evaluation(
    runtime: Runtime, rows: int, dim: int, batch: int, ids: int, width: int, steps: int
) -> Iterator[dict[str, Any]]:
    """An evaluation with tables on the host beside one with tables in HBM.

    Args:
        runtime: CUDA.
        rows: rows of each table.
        dim: columns of each table.
        batch: samples of a batch.
        ids: ids of a feature and sample.
        width: of the four hidden layers of the dense part; 0: there is none.
        steps: number of steps.

    Yields:
        A result for each place of the tables: ms a step, MiB of HBM, and seconds of the CPU.
    """
    tables = Tables(rows, dim)
    with group(), torch.no_grad():
        for what in ("host, read by the GPU", "host, read by the CPU", "HBM"):
            free, model = runtime.free_hbm(), tables.module()
            try:
                look_up = _evaluated(runtime, tables, model, what)
            except Exception as error:
                yield {"what": what, "failed": f"{type(error).__name__}: {error}"}
                continue
            dense = _dense(TABLES * dim, width).to(runtime.device)
            batches = [drawn(tables, batch, ids, "zipf", seed) for seed in range(_BATCHES)]
            for features in batches[:2]:
                dense(look_up(features))
            runtime.synchronize()
            taken, begin, cpu = free - runtime.free_hbm(), time.perf_counter(), os.times()
            for _, features in zip(range(steps), cycle(batches), strict=False):
                dense(look_up(features))
            runtime.synchronize()
            wall, after = time.perf_counter() - begin, os.times()
            yield {
                "what": what,
                "width": width,
                "ms_a_step": 1e3 * wall / steps,
                "hbm_mib": taken / 2**20,
                "cpu_s": after.user + after.system - cpu.user - cpu.system,
            }


def _evaluated(runtime: Runtime, tables: Tables, model: Any, what: str) -> LookUp:
    if what == "HBM":
        return fbgemm(tables, "DEVICE", model.bags, runtime.device)
    place = GPU if what.endswith("GPU") else HOST
    made = sharded(model, "direct", place)
    return lambda features: values_of(made, features).to(runtime.device)


def _dense(columns: int, width: int) -> nn.Module:
    if width == 0:
        return nn.Identity()
    widths = [columns, *[width] * 4, 1]
    layers = [
        layer
        for before, after in pairwise(widths)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])
