"""The demo's line of direct reads: each rank reads the rows of its batch in all ranks' tables."""

from __future__ import annotations

from benchmarks.demo.variants import Variant
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder


def direct_reads() -> Variant:
    """Direct reads, driven as TorchRec's own forward is: no rank waits for another one."""
    return Variant(
        name="direct reads",
        bound=None,
        sharder=BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct")),
        start=lambda model: lambda batches: model(next(batches)),
        stats=lambda model: [],
        close=lambda model: None,
    )
