"""The bounded-lag line of the demo: BLS sharders under a BoundedLagPipeline."""

from __future__ import annotations

from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.demo.steps import Progress
from benchmarks.demo.variants import Variant
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    ChannelStats,
    bounded_lag_channels,
)


def bounded_lag(bound: int, batch: int) -> Variant:
    """Bounded lag with the given bound; slots are sized for ``batch`` rows a rank."""
    return Variant(
        name=f"bound {bound}",
        bound=bound,
        sharder=BLSEmbeddingBagCollectionSharder(
            config=BLSConfig(bound=bound, expected_batch=batch)
        ),
        start=lambda model: _start(model, bound),
        stats=_stats,
        close=_close,
    )


def _start(model: DistributedModelParallel, bound: int) -> Progress:
    progress: Progress = BoundedLagPipeline(model, bound=bound).progress
    return progress


def _stats(model: DistributedModelParallel) -> list[ChannelStats]:
    return [channel.stats() for channel in bounded_lag_channels(model)]


def _close(model: DistributedModelParallel) -> None:
    for channel in bounded_lag_channels(model):
        channel.close()
