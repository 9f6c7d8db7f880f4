"""Sharders of TorchRec's quantized modules."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.initial_weights import check_device
from torchrec_bls.distributed.sharder import sharding_group
from torchrec_bls.quant.sharded_module import ShardedQuantCollection

_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
# The generators of sharding_plan say the second.
_KERNELS = (EmbeddingComputeKernel.QUANT.value, EmbeddingComputeKernel.DENSE.value)


class QuantSharder:
    """Mix-in of the sharders, before TorchRec's own.

    Quantize the model as ever (`quantize_inference_model`, or `from_float` of the module), then
    shard it with DistributedModelParallel: each rank keeps its shards as they are stored, in shared
    memory, and looks up its own batch in those of all ranks
    (docs/design/quantized-tables.md).

    Args:
        config: its `lookup` must be "direct" or "auto"; `bad_ids`, `huge_pages` and `deadline`
            count. None: BLSConfig(lookup="direct").
        checkpoint: state dict of the float model, [rows, columns] of float32 or float16 for each
            table, named as there. Each rank quantizes its own rows of it, and the module may be on
            the meta device. None: the module has its weights.

    Raises:
        ValueError: `lookup` is "exchange", or codecs are given.
    """

    _tables_name: ClassVar[str]

    def __init__(
        self,
        config: BLSConfig | None = None,
        *,
        checkpoint: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._config = config or BLSConfig(lookup="direct")
        self._checkpoint = checkpoint
        if self._config.lookup == "exchange" or self._config.codecs is not None:
            raise ValueError(
                f"{type(self).__name__}: quantized tables are read directly and not exchanged: use "
                'BLSConfig(lookup="direct"), without codecs'
            )

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantCollection:
        """Shards `module`, which is taken over; called by DistributedModelParallel on every rank.

        Raises:
            ValueError: the module or its plan can't be sharded so; the text says why.
            RendezvousError: a rank did not come, has no memory for its shards, or other weights.
        """
        check_device(device)
        self._check_plan(params)
        return ShardedQuantCollection(
            module,
            self._tables_name,
            params,
            sharding_group(env),
            self._config,
            module_fqn or type(module).__name__,
            self._checkpoint,
            f"{module_fqn}." if module_fqn else "",
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns what a planner may choose from."""
        return list(_TYPES[:2])

    def _check_plan(self, params: Mapping[str, ParameterSharding]) -> None:
        for table, planned in params.items():
            for what, value, possible in (
                ("sharding type", planned.sharding_type, _TYPES),
                ("compute kernel", planned.compute_kernel, _KERNELS),
            ):
                if value not in possible:
                    reason = (
                        ", since a stored row has one scale and shift for all of its columns"
                        if value == ShardingType.COLUMN_WISE.value
                        else ""
                    )
                    raise ValueError(
                        f"{type(self).__name__}: table '{table}' is planned with {what} {value}, "
                        f"but only {', '.join(possible)} are possible{reason}"
                    )


class BLSQuantEmbeddingBagCollectionSharder(
    QuantSharder,
    QuantEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards TorchRec's quantized EmbeddingBagCollections over processes; see QuantSharder."""

    _tables_name = "embedding_bags"


class BLSQuantEmbeddingCollectionSharder(
    QuantSharder,
    QuantEmbeddingCollectionSharder,  # type: ignore[misc]
):
    """Shards TorchRec's quantized EmbeddingCollections over processes; see QuantSharder."""

    _tables_name = "embeddings"
