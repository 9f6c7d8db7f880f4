"""Costs of GPUs without a measurement: the bandwidths of TorchRec's Topology."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.constants import (
    BIGINT_DTYPE,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
)
from torchrec.distributed.planner.types import CollectiveType, Topology

from ..cost_interface import Estimate, LookupWork, Ops
from ..problem.shard_traffic import EMBEDDING_BYTES

Floats = npt.NDArray[np.float64]

_MICROSECONDS_PER_MS = 1000.0
# A narrower row takes as long to read as one with so many columns.
_LEAST_DIM = 32


class TopologyCosts:
    """`AdditiveCosts` of GPUs, as TorchRec's EmbeddingPerfEstimator has them for whole tables.

    A time is bytes over a bandwidth of the Topology. For lookups it is the bandwidth of HBM, for
    exchanges that within a host or between hosts. The bandwidths are TorchRec's constants, unless
    the Topology was given others. Nothing was measured: ops and exchanges have no start-up time,
    and intervals have no width.

    Args:
        topology: the ranks and their hosts.
    """

    CAVEAT = (
        "uncalibrated: bandwidths of TorchRec's Topology, which nobody measured here; good for "
        "comparing plans, not as times"
    )

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns one rank's forward lookup of all its shards."""
        return _exactly(float(self.marginal_forward(works).sum()))

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns one rank's backward of all its shards."""
        return _exactly(float(self.marginal_backward(works).sum()))

    def marginal_forward(self, works: Sequence[LookupWork]) -> Floats:
        """Returns what each shard adds to a forward, (len(works),) float64 microseconds."""
        ids = np.array([work.samples * work.pooling for work in works])
        samples = np.array([work.samples for work in works])
        pooled = np.array([work.pooled for work in works], bool)
        dim = np.array([work.dim for work in works])
        row_bytes = np.array([work.weight_bytes for work in works]) * np.maximum(dim, _LEAST_DIM)
        results = np.where(pooled, samples, ids)
        moved = ids * (BIGINT_DTYPE + row_bytes) + results * dim * EMBEDDING_BYTES
        wide, half = dim >= FULL_BLOCK_EMB_DIM, dim >= FULL_BLOCK_EMB_DIM // 2
        penalty = np.where(wide, 1.0, np.where(half, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY))
        times: Floats = moved * penalty / self._topology.hbm_mem_bw * _MICROSECONDS_PER_MS
        return times

    def marginal_backward(self, works: Sequence[LookupWork], ops: Ops | None = None) -> Floats:
        """Returns what each shard adds to a backward, (len(works),) float64 microseconds."""
        return self.marginal_forward(works) * float(self._topology.bwd_compute_multiplier)

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float = 1.0,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        """Returns one all-to-all: the largest rank's bytes within a host, or all of them between
        hosts."""
        bandwidth = self._topology.comms_bandwidths.get_bw(
            local_world_size=ranks_per_host or len(sent_bytes),
            world_size=len(sent_bytes),
            collective_type=CollectiveType.ALL_TO_ALL,
        )
        return _exactly(max(*sent_bytes, *received_bytes) / bandwidth * _MICROSECONDS_PER_MS)

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float = 1.0
    ) -> Estimate:
        """Returns one all-reduce of `bytes` on each rank: twice the time of an all-to-all of
        them."""
        local = min(self._topology.local_world_size, world_size)
        each = [bytes] * world_size
        return _exactly(2 * self.all_to_all(each, each, backend, 1.0, local).microseconds)


def _exactly(microseconds: float) -> Estimate:
    return Estimate(microseconds, microseconds, microseconds)
