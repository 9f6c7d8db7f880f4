"""Bounded-lag one-sided embedding all-to-alls for TorchRec.

With torch alone the package has what needs nothing else: the backend "bls" of torch.distributed,
its options, and the channel. The parts made for TorchRec are imported when they are first used.
"""
# ruff: noqa: E402

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torchrec_bls._versions import VersionError, check_native, check_packages, check_torch

# Before any other import: packages that don't match would fail there, with an undefined symbol.
check_torch()
check_native()

from torchrec_bls.collective.backend import process_group
from torchrec_bls.collective.backend.options import BLSOptions
from torchrec_bls.collective.channel import Arrival, BoundedLagChannel, ChannelStats
from torchrec_bls.collective.transport.verbs_config import VerbsConfig
from torchrec_bls.end_together import EndTogether

if TYPE_CHECKING:
    __version__: str
    from torchrec_bls.analysis.recording import record_lookups
    from torchrec_bls.codecs.error_bound import Decay, ErrorBound
    from torchrec_bls.direct.offers.attach import attach
    from torchrec_bls.direct.offers.offer import Offer, offer
    from torchrec_bls.direct.serving.publisher import Publication
    from torchrec_bls.direct.serving.publishing import publish, serving_state, version_of
    from torchrec_bls.direct.serving.serving_state import ServingState
    from torchrec_bls.distributed.codec_config import CodecConfig
    from torchrec_bls.distributed.config import BLSConfig
    from torchrec_bls.distributed.sharded_ebc import BLSEmbeddingBagCollectionSharder
    from torchrec_bls.distributed.sharded_ec import BLSEmbeddingCollectionSharder
    from torchrec_bls.pipeline import (
        BoundedLagPipeline,
        bounded_lag_channels,
        bounded_lag_modules,
    )
    from torchrec_bls.quant.sharder import (
        BLSQuantEmbeddingBagCollectionSharder,
        BLSQuantEmbeddingCollectionSharder,
    )

__all__ = [
    "Arrival",
    "BLSConfig",
    "BLSEmbeddingBagCollectionSharder",
    "BLSEmbeddingCollectionSharder",
    "BLSOptions",
    "BLSQuantEmbeddingBagCollectionSharder",
    "BLSQuantEmbeddingCollectionSharder",
    "BoundedLagChannel",
    "BoundedLagPipeline",
    "ChannelStats",
    "CodecConfig",
    "Decay",
    "EndTogether",
    "ErrorBound",
    "Offer",
    "Publication",
    "ServingState",
    "VerbsConfig",
    "__version__",
    "attach",
    "bounded_lag_channels",
    "bounded_lag_modules",
    "offer",
    "publish",
    "record_lookups",
    "serving_state",
    "version_of",
]

_FOR_TORCHREC = {
    "BLSConfig": "distributed.config",
    "BLSEmbeddingBagCollectionSharder": "distributed.sharded_ebc",
    "BLSEmbeddingCollectionSharder": "distributed.sharded_ec",
    "BLSQuantEmbeddingBagCollectionSharder": "quant.sharder",
    "BLSQuantEmbeddingCollectionSharder": "quant.sharder",
    "BoundedLagPipeline": "pipeline",
    "CodecConfig": "distributed.codec_config",
    "Decay": "codecs.error_bound",
    "ErrorBound": "codecs.error_bound",
    "Offer": "direct.offers.offer",
    "Publication": "direct.serving.publisher",
    "ServingState": "direct.serving.serving_state",
    "attach": "direct.offers.attach",
    "bounded_lag_channels": "pipeline",
    "bounded_lag_modules": "pipeline",
    "offer": "direct.offers.offer",
    "publish": "direct.serving.publishing",
    "record_lookups": "analysis.recording",
    "serving_state": "direct.serving.publishing",
    "version_of": "direct.serving.publishing",
}

process_group.register()


def __getattr__(name: str) -> Any:
    """Imports a part made for TorchRec when it is first used. Says which packages it lacks."""
    if name == "__version__":
        return metadata.version("torchrec-bls")
    if name not in _FOR_TORCHREC:
        raise AttributeError(f"module 'torchrec_bls' has no attribute {name!r}")
    try:
        check_packages()
    except VersionError as error:
        raise VersionError(f"torchrec_bls.{name} is made for TorchRec. {error}") from None
    value = getattr(importlib.import_module(f"torchrec_bls.{_FOR_TORCHREC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
