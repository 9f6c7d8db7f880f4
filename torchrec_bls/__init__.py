"""Bounded-lag one-sided embedding all-to-alls for TorchRec."""

from torchrec_bls.collective.channel import Arrival, BoundedLagChannel, ChannelStats
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.embedding import BLSEmbeddingCollectionSharder
from torchrec_bls.distributed.embeddingbag import BLSEmbeddingBagCollectionSharder

__all__ = [
    "Arrival",
    "BLSConfig",
    "BLSEmbeddingBagCollectionSharder",
    "BLSEmbeddingCollectionSharder",
    "BoundedLagChannel",
    "ChannelStats",
]
