"""Bounded-lag one-sided embedding all-to-alls for TorchRec.

With torch alone the package has what needs nothing else: the backend "bls" of torch.distributed,
its options, and the channel. The import makes the backend known, and so checks torch and the
compiled module. All names are imported when they are first used; what TorchRec needs is checked
then. Modules below the package check nothing: their public names are here.
"""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from torchrec_bls._contract import check_torchrec
from torchrec_bls._first_use import imported_at_first_use
from torchrec_bls._versions import check_native, check_torch

if TYPE_CHECKING:
    __version__: str
    from torchrec_bls.analysis.recording import record_lookups
    from torchrec_bls.codecs.error_bound import Decay, ErrorBound
    from torchrec_bls.collective.backend.options import BLSOptions
    from torchrec_bls.collective.channel import Arrival, BoundedLagChannel, ChannelStats
    from torchrec_bls.collective.transport.verbs_config import VerbsConfig
    from torchrec_bls.delta_writer import DeltaWriter
    from torchrec_bls.direct.keeping.keeper import Keeper, keeper
    from torchrec_bls.direct.keeping.watch import Watch, watch
    from torchrec_bls.direct.offers.attach import attach
    from torchrec_bls.direct.offers.offer import Offer, offer
    from torchrec_bls.direct.serving.captured_forward import CapturedForward
    from torchrec_bls.direct.serving.publisher import Publication
    from torchrec_bls.direct.serving.publishing import (
        publish,
        publish_rows,
        serving_state,
        version_of,
    )
    from torchrec_bls.direct.serving.serving_state import ServingState
    from torchrec_bls.distributed.codec_config import CodecConfig
    from torchrec_bls.distributed.config import BLSConfig
    from torchrec_bls.distributed.model_forwards import forward
    from torchrec_bls.distributed.sharded_ebc import BLSEmbeddingBagCollectionSharder
    from torchrec_bls.distributed.sharded_ec import BLSEmbeddingCollectionSharder
    from torchrec_bls.end_together import EndTogether
    from torchrec_bls.pipeline import (
        BoundedLagPipeline,
        bounded_lag_channels,
        bounded_lag_modules,
    )
    from torchrec_bls.quant.sharder import (
        BLSQuantEmbeddingBagCollectionSharder,
        BLSQuantEmbeddingCollectionSharder,
    )
    from torchrec_bls.serve.contract import Contract
    from torchrec_bls.serve.service import Service

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
    "CapturedForward",
    "ChannelStats",
    "CodecConfig",
    "Contract",
    "Decay",
    "DeltaWriter",
    "EndTogether",
    "ErrorBound",
    "Keeper",
    "Offer",
    "Publication",
    "Service",
    "ServingState",
    "VerbsConfig",
    "Watch",
    "__version__",
    "attach",
    "bounded_lag_channels",
    "bounded_lag_modules",
    "forward",
    "keeper",
    "offer",
    "publish",
    "publish_rows",
    "record_lookups",
    "serving_state",
    "version_of",
    "watch",
]

_WITH_TORCH_ALONE = {
    "Arrival": ".collective.channel",
    "BLSOptions": ".collective.backend.options",
    "BoundedLagChannel": ".collective.channel",
    "ChannelStats": ".collective.channel",
    "Decay": ".codecs.error_bound",
    "EndTogether": ".end_together",
    "ErrorBound": ".codecs.error_bound",
    "VerbsConfig": ".collective.transport.verbs_config",
}
_FOR_TORCHREC = {
    "BLSConfig": ".distributed.config",
    "BLSEmbeddingBagCollectionSharder": ".distributed.sharded_ebc",
    "BLSEmbeddingCollectionSharder": ".distributed.sharded_ec",
    "BLSQuantEmbeddingBagCollectionSharder": ".quant.sharder",
    "BLSQuantEmbeddingCollectionSharder": ".quant.sharder",
    "BoundedLagPipeline": ".pipeline",
    "CapturedForward": ".direct.serving.captured_forward",
    "CodecConfig": ".distributed.codec_config",
    "Contract": ".serve.contract",
    "DeltaWriter": ".delta_writer",
    "Keeper": ".direct.keeping.keeper",
    "Offer": ".direct.offers.offer",
    "Publication": ".direct.serving.publisher",
    "Service": ".serve.service",
    "ServingState": ".direct.serving.serving_state",
    "Watch": ".direct.keeping.watch",
    "attach": ".direct.offers.attach",
    "bounded_lag_channels": ".pipeline",
    "bounded_lag_modules": ".pipeline",
    "forward": ".distributed.model_forwards",
    "keeper": ".direct.keeping.keeper",
    "offer": ".direct.offers.offer",
    "publish": ".direct.serving.publishing",
    "publish_rows": ".direct.serving.publishing",
    "record_lookups": ".analysis.recording",
    "serving_state": ".direct.serving.publishing",
    "version_of": ".direct.serving.publishing",
    "watch": ".direct.keeping.watch",
}
_with_torch_alone = imported_at_first_use(__name__, _WITH_TORCH_ALONE, check_torch)
_for_torchrec = imported_at_first_use(__name__, _FOR_TORCHREC, check_torchrec)


def _register_backend() -> None:
    # Without this check the import would fail with an undefined symbol, or lack a name.
    check_torch()
    check_native()
    from torchrec_bls.collective.backend import process_group

    process_group.register()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("torchrec-bls")
    return (_with_torch_alone if name in _WITH_TORCH_ALONE else _for_torchrec)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_backend()
