"""Times lookups on the CPU: FBGEMM's forward and backward, and the exchange's own reading."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
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

from torchrec_bls import _native
from torchrec_bls.slot_size import SMALLEST_SLOT_BYTES, wanted_slot_bytes

from ..costs.lookup.model import BY_EXCHANGE
from ..reuse.statistics import reuse_factors, row_counts
from .configurations import Integers, LookupConfiguration, draw_ids

#: Fills any cache of the machines that are calibrated twice over.
EVICTION_BYTES = 64 * 2**20
_DEADLINE_S = 60.0
_PRECISIONS = {4: SparseType.FP32, 2: SparseType.FP16}


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps this process on one core: the measured caches are then those of one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class LookupTimer:
    """Times configurations in this process, on one thread.

    A training step does other work between two lookups. That leaves the lookup's code in the caches
    but little of the tables. So before each timed call the caches are filled with something else,
    and a lookup of one row is made. Times are the thread's own, without what other processes take.

    Args:
        optimizer: FBGEMM's name of the optimizer that is fused into the backward.
    """

    def __init__(self, optimizer: str) -> None:
        torch.set_num_threads(1)
        self._optimizer = EmbOptimType(optimizer)
        self._other = torch.zeros(EVICTION_BYTES // 8, dtype=torch.float64)
        self._tiny: dict[tuple[int, bool], _Lookup] = {}

    def measure(
        self, configurations: Sequence[LookupConfiguration], rounds: int
    ) -> list[tuple[dict[str, Any], dict[str, list[float]]]]:
        """Times configurations in turn: a slow moment of the machine hits each of them only once.

        Args:
            configurations: lookups to time; all of them are in memory together.
            rounds: number of times that each lookup is timed.

        Returns:
            For each lookup its configuration, and for each table its lookups, unique rows and reuse
            factors by rows, without the empty bins at their end. And the times: `forward_us`,
            `backward_us`, and of float32 rows `by_exchange_us`, the microseconds of each round.
        """
        workloads, lookups = [], []
        for configuration in configurations:
            seed, samples = configuration.seed, configuration.samples
            batches = [
                draw_ids(table, samples, np.random.default_rng([seed, i]))
                for i, table in enumerate(configuration.tables)
            ]
            workloads.append(_describe(configuration, batches))
            lookups.append(
                _Lookup(
                    [(table.rows, table.dim) for table in configuration.tables],
                    np.concatenate([ids for _, ids in batches]),
                    np.concatenate([lengths for lengths, _ in batches]),
                    configuration.weight_bytes,
                    configuration.pooled,
                    self._optimizer,
                )
            )
        times: list[dict[str, list[float]]] = [{} for _ in lookups]
        for _ in range(rounds):
            for lookup, its_times in zip(lookups, times, strict=True):
                tiny = self._tiny_like(lookup)
                for name, work in lookup.works().items():
                    its_times.setdefault(f"{name}_us", []).append(self._timed(tiny, work))
        return list(zip(workloads, times, strict=True))

    def _tiny_like(self, lookup: _Lookup) -> _Lookup:
        if lookup.kind not in self._tiny:
            one = np.ones(1, dtype=np.int64)
            self._tiny[lookup.kind] = _Lookup([(8, 4)], one, one, *lookup.kind, self._optimizer)
        return self._tiny[lookup.kind]

    def _timed(self, tiny: _Lookup, work: Callable[[], None]) -> float:
        self._other.sum()
        for work_of_one in tiny.works().values():
            work_of_one()
        start = time.thread_time_ns()
        work()
        return round((time.thread_time_ns() - start) / 1e3, 1)


class _Lookup:
    """One fused op with its batch.

    Attributes:
        kind: bytes of a weight, and whether it is pooled.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        ids: Integers,
        lengths: Integers,
        weight_bytes: int,
        pooled: bool,
        optimizer: EmbOptimType,
    ) -> None:
        self.kind = (weight_bytes, pooled)
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
        self._own: OwnReading | None = None
        if weight_bytes == torch.float32.itemsize:
            self._own = OwnReading(self._op.split_embedding_weights(), ids, lengths, pooled)

    def works(self) -> dict[str, Callable[[], None]]:
        """Returns what is timed, in this order, by its direction."""
        works = {"forward": self._forward, "backward": self._backward}
        return works if self._own is None else {**works, BY_EXCHANGE: self._own.read}

    def _forward(self) -> None:
        self._output = self._op(self._ids, self._offsets)

    def _backward(self) -> None:
        """Updates the tables by the gradient of the last output."""
        self._output.backward(self._gradient)


class OwnReading:
    """What a bounded-lag exchange does by itself in place of a lookup: it reads the rows that a
    batch asks for, as `post_pooled_rows` and `post_table_rows` do.

    Args:
        tables: float32 weights of the tables, (rows, dim) each; unpooled ones of one dim.
        ids: (sum of lengths,) int64, those of the tables one behind the other.
        lengths: (tables x samples,) int64.
        pooled: whether the rows of a bag are added up.

    Attributes:
        out: (samples, sum of dims) or (ids, dim) float32, what was read last.
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], ids: Integers, lengths: Integers, pooled: bool
    ) -> None:
        self._tables = _native.Tables([(table, False) for table in tables])
        self._ids = _arrived(torch.from_numpy(ids), torch.from_numpy(lengths), len(tables))
        samples = len(lengths) // len(tables)
        dims = [table.shape[1] for table in tables]
        results = (samples, sum(dims)) if pooled else (len(ids), dims[0])
        self.out = torch.ones(results)  # memory that was never written is not there yet
        self._pooled = pooled

    def read(self) -> None:
        """Writes the batch's rows or sums to memory as large as slots for them."""
        look_up = _native.sum_rows if self._pooled else _native.copy_table_rows
        look_up(self._tables, self._ids, self.out)


def _arrived(ids: torch.Tensor, lengths: torch.Tensor, features: int) -> _native.BatchIds:
    """Returns ids that this process has sent itself."""
    slot_bytes = SMALLEST_SLOT_BYTES + wanted_slot_bytes(ids.nbytes + lengths.nbytes)
    transport = _native.ShmTransport(0, 1, 2, slot_bytes)
    transport.connect([transport.address])
    transport.seal()
    channel = _native.Channel(transport, 0, 1, 0, 2, _DEADLINE_S, "calibration", 1)
    samples = len(lengths) // features
    _native.post_ids(channel, lengths, ids, None, features, samples, [features], [])
    arrival = channel.wait()
    batch = _native.BatchIds(arrival, features, [0])
    channel.release(arrival.sequence, {})
    channel.close()
    return batch


def _describe(
    configuration: LookupConfiguration, batches: list[tuple[Integers, Integers]]
) -> dict[str, Any]:
    counts = [row_counts(ids) for _, ids in batches]
    factors = [np.trim_zeros(reuse_factors(each), "b").tolist() for each in counts]
    return {
        "configuration": configuration.as_json(),
        "lookups": [int(lengths.sum()) for lengths, _ in batches],
        "unique_rows": [len(each) for each in counts],
        "reuse_factors": [[round(share, 4) for share in each] for each in factors],
    }
