"""EmbeddingCollection, sharded with bounded-lag exchanges."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
    get_ec_index_dedup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_bls._deprecated import config_by_name
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.codec_config import has_decay
from torchrec_bls.distributed.config import BLSConfig, name_of_module
from torchrec_bls.distributed.initial_weights import load_initial_weights
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.lookup_choice import chosen_lookup
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedSequenceOutputDist
from torchrec_bls.distributed.outputs.sequence_output_dist import SequenceOutputDist
from torchrec_bls.distributed.outputs.training_iterations import keep_in_checkpoints
from torchrec_bls.distributed.sequence_dists import SequenceDists
from torchrec_bls.distributed.sharder import BoundedLagSharder, sharding_group
from torchrec_bls.distributed.torchrec_dists import FirstBatchMark, codec_plan, swap_ids_dists

_NO_DEDUP = (
    "ids can't be deduplicated (use_index_dedup): FBGEMM does that on GPUs alone, its "
    "jagged_unique_indices has no kernel for the CPU. Leave it off"
)


class BLSEmbeddingCollection(BoundedLagModule, ShardedEmbeddingCollection):  # type: ignore[misc]
    """TorchRec's ShardedEmbeddingCollection that exchanges through bounded-lag channels."""

    _has_uninitialized_input_dist = FirstBatchMark()

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        gpu: Gpu | None = None,
        **kwargs: Any,
    ) -> None:
        if get_ec_index_dedup():
            raise ValueError(f"{_NO_DEDUP}: set_ec_index_dedup(False)")
        self._init_bounded_lag(
            config,
            sharding_group(env),
            name_of_module(config, module_fqn or type(self).__name__),
            module.embedding_configs(),
            params,
            False,
            gpu=gpu,
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)
        if config.codecs is not None and has_decay(config.codecs):
            keep_in_checkpoints(self)
        if module.device.type == "meta":
            load_initial_weights(self, module)  # otherwise TorchRec has loaded them

    def _choose(self) -> Lookup:
        return chosen_lookup(SequenceDists(self, self._bls), self._bls)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        shardings = self._sharding_type_to_sharding.items()
        swap_ids_dists(self._bls, shardings, self._input_dists, pooled=False)

    def _create_output_dist(self) -> None:
        codecs = self._bls.exchanges.config.codecs
        for sharding_type, sharding in self._sharding_type_to_sharding.items():
            arguments = (
                self._env.rank,
                self._bls.exchanges.of(sharding_type, "embeddings"),
                self._bls.exchanges.of(sharding_type, "gradients"),
                [self._env.world_size],
                (),
                self._bls.empty_output,
            )
            self._output_dists.append(
                SequenceOutputDist(*arguments)
                if codecs is None
                else CodedSequenceOutputDist(
                    codec_plan(self._bls, sharding),
                    codecs.non_finite,
                    lambda: self._bls.iterations,
                    *arguments,
                )
            )


_NO_DENSE_KERNEL = (
    "FBGEMM's dense kernel, which data_parallel takes, mishandles unpooled lookups on CPU and "
    "corrupts memory"
)


class BLSEmbeddingCollectionSharder(
    BoundedLagSharder,
    EmbeddingCollectionSharder,  # type: ignore[misc]
):
    """Shards EmbeddingCollections table-, row- or column-wise with bounded-lag exchanges.

    The arguments are BoundedLagSharder's, and `use_index_dedup` as in TorchRec.

    Raises:
        ValueError: `use_index_dedup` is set, which needs a GPU.
    """

    @config_by_name(BLSConfig)
    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: object = None,
        use_index_dedup: bool = False,
        *,
        config: BLSConfig | None = None,
    ) -> None:
        if use_index_dedup:
            raise ValueError(_NO_DEDUP)
        super().__init__(
            fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry, config=config
        )

    _sharding_types = (
        ShardingType.TABLE_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.COLUMN_WISE.value,
    )
    _kernels = (EmbeddingComputeKernel.FUSED.value,)
    _refused: ClassVar[Mapping[str, str]] = {
        ShardingType.DATA_PARALLEL.value: _NO_DENSE_KERNEL,
        EmbeddingComputeKernel.DENSE.value: _NO_DENSE_KERNEL,
        **dict.fromkeys(
            (
                ShardingType.TABLE_ROW_WISE.value,
                ShardingType.TABLE_COLUMN_WISE.value,
                ShardingType.GRID_SHARD.value,
            ),
            "TorchRec has it for EmbeddingBagCollections alone",
        ),
    }
    _sharded_module = BLSEmbeddingCollection
