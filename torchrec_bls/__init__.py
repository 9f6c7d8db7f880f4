"""Bounded-lag one-sided embedding all-to-alls for TorchRec."""
# ruff: noqa: E402

from torchrec_bls._versions import check_native, check_packages

# Before any other import: a pair that doesn't match would fail there with an undefined symbol.
check_packages()
check_native()

from torchrec_bls.collective import backend
from torchrec_bls.collective.backend_options import BLSOptions
from torchrec_bls.collective.channel import Arrival, BoundedLagChannel, ChannelStats
from torchrec_bls.collective.verbs_config import VerbsConfig
from torchrec_bls.distributed.codecs import CodecConfig
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.embedding import BLSEmbeddingCollectionSharder
from torchrec_bls.distributed.embeddingbag import BLSEmbeddingBagCollectionSharder
from torchrec_bls.pipeline import (
    BoundedLagPipeline,
    bounded_lag_channels,
    bounded_lag_modules,
)

__all__ = [
    "Arrival",
    "BLSConfig",
    "BLSEmbeddingBagCollectionSharder",
    "BLSEmbeddingCollectionSharder",
    "BLSOptions",
    "BoundedLagChannel",
    "BoundedLagPipeline",
    "ChannelStats",
    "CodecConfig",
    "VerbsConfig",
    "bounded_lag_channels",
    "bounded_lag_modules",
]

backend.register()
