"""EmbeddingCollection, sharded with bounded-lag exchanges."""

from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.types import (
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.embeddings import SequenceOutputDist
from torchrec_bls.distributed.module import (
    BoundedLagModule,
    check_sharding_types,
    rows_by_feature,
)

_SHARDING_TYPES = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
]


class BLSEmbeddingCollection(BoundedLagModule, ShardedEmbeddingCollection):  # type: ignore[misc]
    """TorchRec's ShardedEmbeddingCollection with its all-to-alls through bounded-lag channels."""

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        **kwargs: Any,
    ) -> None:
        self._init_bounded_lag(
            config, env.process_group, module_fqn, rows_by_feature(module.embedding_configs())
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        self._swap_ids_dists(self._sharding_type_to_sharding, self._input_dists)

    def _create_output_dist(self) -> None:
        for sharding_type in self._sharding_type_to_sharding:
            self._output_dists.append(
                SequenceOutputDist(
                    self._exchange(sharding_type, "embeddings"),
                    self._exchange(sharding_type, "gradients"),
                    [self._env.world_size],
                )
            )


class BLSEmbeddingCollectionSharder(EmbeddingCollectionSharder):  # type: ignore[misc]
    """Shards EmbeddingCollections table-, row- or column-wise with bounded-lag exchanges.

    Args:
        config: of the exchanges.
        fused_params: of TorchRec's fused kernels (optimizer, learning rate, ...).
        qcomm_codecs_registry: must be empty: bounded-lag messages carry rows as they are.
        use_index_dedup: look every id up once, as in TorchRec.

    Raises:
        ValueError: codecs are given.
    """

    def __init__(
        self,
        config: BLSConfig | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        if qcomm_codecs_registry:
            raise ValueError("bounded-lag sharders take no qcomm_codecs_registry")
        super().__init__(fused_params, None, use_index_dedup)
        self._config = config or BLSConfig()

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> BLSEmbeddingCollection:
        """Shards `module` by `params`; called by DistributedModelParallel on every rank.

        Raises:
            ValueError: a table has a sharding type other than table-, row- or column-wise.
        """
        check_sharding_types(type(self).__name__, params, _SHARDING_TYPES)
        return BLSEmbeddingCollection(
            self._config,
            module,
            params,
            env,
            module_fqn,
            fused_params=self.fused_params,
            device=device,
            use_index_dedup=self._use_index_dedup,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns what a planner may choose from."""
        return list(_SHARDING_TYPES)

    @property
    def sharded_module_type(self) -> type[BLSEmbeddingCollection]:
        """The class that `shard` returns."""
        return BLSEmbeddingCollection
