"""Times fused lookups of FBGEMM on the CPU, forward and backward."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from ..reuse import reuse_factors, row_counts
from .configurations import LookupConfiguration, draw_ids

#: Fills any cache of the machines that are calibrated twice over.
EVICTION_BYTES = 64 * 2**20
LEAST_REPEATS, MOST_REPEATS = 4, 8
_PRECISIONS = {4: SparseType.FP32, 2: SparseType.FP16}


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps this process on one core, whose own caches then stay the ones that are measured."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class LookupTimer:
    """Times configurations in this process, on one thread.

    A training step does other work between two lookups, which leaves little of the tables in the
    caches but the lookup's code: before each timed call the caches are read full of something else,
    and a lookup of one row is made. Time is that of the thread, without what other processes take.

    Args:
        optimizer: FBGEMM's name of the optimizer that is fused into the backward.
    """

    def __init__(self, optimizer: str) -> None:
        torch.set_num_threads(1)
        self._optimizer = EmbOptimType(optimizer)
        self._other = torch.zeros(EVICTION_BYTES // 8, dtype=torch.float64)
        self._tiny: dict[tuple[int, bool], _Lookup] = {}

    def measure(
        self, configuration: LookupConfiguration, seconds: float
    ) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Times one configuration.

        Args:
            configuration: what to look up.
            seconds: repeats end after this time, but at least `LEAST_REPEATS` are made.

        Returns:
            What was looked up: the configuration, and each table's lookups, unique rows and reuse
            factors by rows, without the empty bins at their end. And the times: `forward_us` and
            `backward_us`, the microseconds of each repeat.
        """
        kind = (configuration.weight_bytes, configuration.pooled)
        if kind not in self._tiny:
            self._tiny[kind] = _Lookup.tiny(*kind, self._optimizer)
        tiny = self._tiny[kind]
        batches = [
            draw_ids(table, configuration.samples, np.random.default_rng([configuration.seed, i]))
            for i, table in enumerate(configuration.tables)
        ]
        ids = np.concatenate([ids for _, ids in batches])
        lengths = np.concatenate([lengths for lengths, _ in batches])
        shapes = [(table.rows, table.dim) for table in configuration.tables]
        lookup = _Lookup(shapes, ids, lengths, *kind, self._optimizer)
        forward, backward = [], []
        end = time.monotonic() + seconds
        while len(forward) < MOST_REPEATS and (
            len(forward) < LEAST_REPEATS or time.monotonic() < end
        ):
            forward.append(self._timed(tiny, lookup.forward))
            backward.append(self._timed(tiny, lookup.backward))
        counts = [row_counts(ids) for _, ids in batches]
        workload = {
            "configuration": configuration.as_json(),
            "lookups": [int(lengths.sum()) for lengths, _ in batches],
            "unique_rows": [len(each) for each in counts],
            "reuse_factors": [_without_end(reuse_factors(each)) for each in counts],
        }
        times = {
            "forward_us": [round(each, 1) for each in forward],
            "backward_us": [round(each, 1) for each in backward],
        }
        return workload, times

    def _timed(self, tiny: _Lookup, work: Callable[[], None]) -> float:
        self._other.sum()
        tiny.forward()
        tiny.backward()
        start = time.thread_time_ns()
        work()
        return (time.thread_time_ns() - start) / 1e3


class _Lookup:
    """One fused op with its batch."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        ids: np.ndarray[Any, np.dtype[np.int64]],
        lengths: np.ndarray[Any, np.dtype[np.int64]],
        weight_bytes: int,
        pooled: bool,
        optimizer: EmbOptimType,
    ) -> None:
        self._op = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
            weights_precision=_PRECISIONS[weight_bytes],
            optimizer=optimizer,
            pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
            learning_rate=1e-3,
        )
        for weights in self._op.split_embedding_weights():
            # Memory that was never written is one page of zeros, which is always in the cache.
            weights.fill_(0.01)
        self._ids = torch.from_numpy(ids)
        self._offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        self._gradient = torch.full_like(self._op(self._ids, self._offsets), 1e-3)

    @classmethod
    def tiny(cls, weight_bytes: int, pooled: bool, optimizer: EmbOptimType) -> _Lookup:
        """One row of one small table."""
        one = np.ones(1, dtype=np.int64)
        return cls([(8, 4)], one, one, weight_bytes, pooled, optimizer)

    def forward(self) -> None:
        """Looks the batch up."""
        self._output = self._op(self._ids, self._offsets)

    def backward(self) -> None:
        """Updates the tables by the gradient of the last output."""
        self._output.backward(self._gradient)


def _without_end(shares: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    return [round(share, 4) for share in np.trim_zeros(shares, "b").tolist()]
