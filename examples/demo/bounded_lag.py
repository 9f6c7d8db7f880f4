"""The bounded-lag line of the demo: BLS sharders under a BoundedLagPipeline."""

from __future__ import annotations

from torchrec.distributed.model_parallel import DistributedModelParallel

from demo.steps import Progress
from demo.variants import Traffic, Variant
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagChannel,
    BoundedLagPipeline,
    bounded_lag_modules,
)
from torchrec_bls.errors import PeerClosedError, PeerDiedError, PoisonedError


def bounded_lag(bound: int, batch: int) -> Variant:
    """Bounded lag with the given bound; slots are sized for ``batch`` rows a rank."""
    return Variant(
        name=f"bound {bound}",
        bound=bound,
        sharder=BLSEmbeddingBagCollectionSharder(
            config=BLSConfig(bound=bound, expected_batch=batch)
        ),
        start=lambda model: _start(model, bound),
        traffic=_traffic,
        close=_close,
    )


def _start(model: DistributedModelParallel, bound: int) -> Progress:
    progress: Progress = BoundedLagPipeline(model, bound=bound).progress
    return progress


def _channels(model: DistributedModelParallel) -> list[BoundedLagChannel]:
    return [
        channel
        for module in bounded_lag_modules(model).values()
        for channel in module.channels().values()
    ]


def _traffic(model: DistributedModelParallel) -> Traffic:
    stats = [channel.stats() for channel in _channels(model)]
    return Traffic(
        waited=sum(sum(channel.wait_seconds) for channel in stats),
        pulled=sum(channel.pulled_messages for channel in stats),
        ring_bytes=sum(channel.ring_bytes for channel in stats),
    )


def _close(model: DistributedModelParallel) -> None:
    for channel in _channels(model):
        channel.close()


def is_consequence(error: Exception) -> bool:
    """Whether a rank got the error because another one had failed before."""
    return isinstance(error, (PeerClosedError, PeerDiedError, PoisonedError)) or (
        isinstance(error, RuntimeError) and "Connection closed by peer" in str(error)
    )
