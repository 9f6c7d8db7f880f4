"""Interface between planner and cost models: times with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Estimate:
    """A predicted time with the interval in which 9 of 10 measurements are expected.

    Attributes:
        microseconds: the prediction.
        low: lower end of the interval, microseconds.
        high: upper end of the interval, microseconds.
        on_core: share of the time that a rank works on a core, 0 to 1; for the rest it waits for
            something that no core does.
    """

    microseconds: float
    low: float
    high: float
    on_core: float = 1.0


@dataclass(frozen=True)
class LookupWork:
    """One table shard's lookup on one rank in one step.

    Attributes:
        rows: rows of the shard held by the rank.
        dim: columns of the shard held by the rank.
        weight_bytes: bytes of one weight: 4, 2, 1.
        samples: samples looked up on this rank (world size x local batch where the shard serves
            the whole batch: table-, column- and row-wise).
        pooling: mean ids per sample that reach this shard.
        unique_rows: distinct rows of this shard read in the step.
        pooled: EmbeddingBag (True) or Embedding (False).
        by_exchange: whether the exchange reads the rows, in place of FBGEMM: bounded-lag channels
            write float32 rows from the tables into slots where nothing is differentiated.
    """

    rows: int
    dim: int
    weight_bytes: int
    samples: float
    pooling: float
    unique_rows: float
    pooled: bool
    by_exchange: bool = False


@dataclass(frozen=True)
class Ops:
    """The fused ops that look shards up, as FBGEMM fuses them.

    Attributes:
        of: (shards,) int64, the op of each shard.
        per_op: (shards,) float64, number of equal shards in the op; below 1 where only some ranks
            have one.
    """

    of: npt.NDArray[np.int64]
    per_op: npt.NDArray[np.float64]

    @classmethod
    def together(cls, shards: int) -> Ops:
        """Returns one op of all shards."""
        return cls(np.zeros(shards, dtype=np.int64), np.ones(shards))

    @classmethod
    def alone(cls, shards: int) -> Ops:
        """Returns an op for each shard."""
        return cls(np.arange(shards), np.ones(shards))

    def take(self, shards: npt.NDArray[np.int64]) -> Ops:
        """Returns the ops of these shards only."""
        return Ops(self.of[shards], self.per_op[shards])


class CostModel(Protocol):
    """Times of what one step does, on one machine."""

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """One rank's forward lookup of all its shards in one fused op."""

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """One rank's backward and optimizer step of all its shards in one fused op."""

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float = 1.0,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        """One all-to-all among `len(sent_bytes)` ranks.

        Args:
            sent_bytes: (world_size,), each rank's total over all destinations, itself included.
            received_bytes: (world_size,), each rank's total over all sources, itself included.
            backend: "gloo", "nccl", "bls", or "tcp" for channels of bls over TCP.
            ranks_per_core: number of ranks that share a core, at least 1: they pay for each other's
                bytes.
            ranks_per_host: number of ranks that share a host, whose links may be faster; None: all.
        """

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float = 1.0
    ) -> Estimate:
        """One all-reduce of `bytes` on each of `world_size` ranks.

        Args:
            bytes: bytes of each rank.
            world_size: number of ranks.
            backend: "gloo", "nccl" or "bls".
            ranks_per_core: see `all_to_all`.
        """


class AdditiveCosts(CostModel, Protocol):
    """A cost model whose fused lookups are a constant plus a sum over shards.

    What a shard adds to a backward may depend on the other shards of its op.
    """

    def marginal_forward(self, works: Sequence[LookupWork]) -> npt.NDArray[np.float64]:
        """What each shard adds to a fused forward, (len(works),) float64 microseconds."""

    def marginal_backward(
        self, works: Sequence[LookupWork], ops: Ops | None = None
    ) -> npt.NDArray[np.float64]:
        """What each shard adds to a fused backward, (len(works),) float64 microseconds.

        Args:
            works: the shards.
            ops: op of each shard; None: each is alone.
        """


class TableReuse(Protocol):
    """What the planner reads of a table's reuse statistics."""

    @property
    def pooling_factor(self) -> float:
        """Mean ids per sample."""

    def unique_rows(self, samples: float) -> float:
        """Distinct rows that a batch of `samples` reads."""
