"""The sharders that a run of TorchRec's tests uses, with TorchRec's arguments."""

import os
import sys
from dataclasses import replace
from itertools import count
from typing import Any

from torchrec.distributed.embedding import EmbeddingCollectionSharder as TorchRecEC
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecEBC
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder as TorchRecQuantEC
from torchrec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder as TorchRecQuantEBC,
)

from tests.torchrec_suite.tree import MODE, NAMES
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
    CodecConfig,
)
from torchrec_bls.quant.sharder import (
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

_models = count()
_PRECISIONS = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "uint8"}


class _TakesTorchRecsArguments:
    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._refusal: ValueError | None = None
        try:
            config = BLSConfig(codecs=_codecs(qcomm_codecs_registry))
            super().__init__(fused_params, config=config, **others)  # type: ignore[call-arg]
        except ValueError as error:
            # A constructor that raises would end the test, and with it the examples that follow.
            self._refusal = error
            super().__init__(fused_params=fused_params)  # type: ignore[call-arg]
        self._qcomm_codecs_registry = qcomm_codecs_registry

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        if self._refusal is not None:
            raise self._refusal
        # The tests compare models of one construction, which need names.
        self._config = replace(self._config, name=f"model {next(_models)}")
        return super().shard(*args, **kwargs)  # type: ignore[misc]


def _codecs(registry: dict[str, Any] | None) -> CodecConfig | None:
    if not registry:
        return None
    forward, backward = (
        {_precision(getattr(codecs, way)) for codecs in registry.values()}
        for way in ("forward", "backward")
    )
    if len(forward) > 1 or len(backward) > 1:
        raise ValueError(f"codecs by operation are not supported: {forward}, {backward}")
    return CodecConfig(forward=forward.pop(), backward=backward.pop())


def _precision(codec: Any) -> str:
    name = codec._comm_precision.name
    if name not in _PRECISIONS:
        raise ValueError(f"there is no codec {name}")
    return _PRECISIONS[name]


class _EBC(_TakesTorchRecsArguments, BLSEmbeddingBagCollectionSharder):
    pass


class _EC(_TakesTorchRecsArguments, BLSEmbeddingCollectionSharder):
    pass


def _is_bls() -> bool:
    return os.environ[MODE] == "bls"


EmbeddingBagCollectionSharder = _EBC if _is_bls() else TorchRecEBC
EmbeddingCollectionSharder = _EC if _is_bls() else TorchRecEC
QuantEmbeddingBagCollectionSharder = (
    BLSQuantEmbeddingBagCollectionSharder if _is_bls() else TorchRecQuantEBC
)
QuantEmbeddingCollectionSharder = (
    BLSQuantEmbeddingCollectionSharder if _is_bls() else TorchRecQuantEC
)


def _replace_defaults() -> None:
    """Replaces the sharders that TorchRec itself takes where none is given."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec.") and name.rpartition(".")[2] != "sharders":
            for each in NAMES & vars(module).keys():
                taken = vars(module)[each]
                # Where a class is defined, its subclasses need it as it is.
                if taken.__module__ != name and taken.__module__.startswith("torchrec."):
                    setattr(module, each, globals()[each])


if _is_bls():
    _replace_defaults()
