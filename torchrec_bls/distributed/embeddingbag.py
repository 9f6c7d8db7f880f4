"""EmbeddingBagCollection, sharded with bounded-lag exchanges."""

from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.distributed.codecs import plan_codecs
from torchrec_bls.distributed.coded import CodedPooledOutputDist
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.embeddings import ColumnGroup, PooledOutputDist
from torchrec_bls.distributed.inference import outside_inference_mode
from torchrec_bls.distributed.initial_weights import check_device, load_initial_weights
from torchrec_bls.distributed.module import BoundedLagModule
from torchrec_bls.distributed.reshard import reshard
from torchrec_bls.distributed.routes import Route, plan_routes
from torchrec_bls.distributed.sharder import BoundedLagSharder
from torchrec_bls.distributed.tables import sums_rows


def _column_groups(sharding_type: str, theirs: Any, world_size: int) -> list[ColumnGroup]:
    """Reads from TorchRec's output dist which ranks compute which columns."""
    if sharding_type == ShardingType.ROW_WISE.value:
        return [ColumnGroup(0, world_size, sum(theirs._embedding_dims))]
    if sharding_type == ShardingType.TABLE_ROW_WISE.value:
        local_size = theirs._intra_pg.size()
        return [
            ColumnGroup(node * local_size, local_size, width)
            for node, width in enumerate(theirs._dim_sum_per_node)
        ]
    return [ColumnGroup(rank, 1, width) for rank, width in enumerate(theirs._dim_sum_per_rank)]


def _gradient_divisors(sharding_type: str, theirs: Any, world_size: int) -> list[int]:
    if sharding_type == ShardingType.TABLE_ROW_WISE.value:
        # TorchRec divides in the backward of both of its exchanges.
        return [theirs._cross_pg.size(), theirs._intra_pg.size()]
    return [world_size]


class BLSEmbeddingBagCollection(
    BoundedLagModule,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """TorchRec's ShardedEmbeddingBagCollection with its exchanges through bounded-lag channels."""

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        **kwargs: Any,
    ) -> None:
        check_device(kwargs.get("device"))
        self._init_bounded_lag(
            config, env.process_group, module_fqn, module.embedding_bag_configs(), params
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)
        load_initial_weights(self, module)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        self._swap_ids_dists(self._sharding_types, self._input_dists)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        world_size = self._env.world_size
        codecs = self._bls_config.codecs
        for index, sharding_type in enumerate(self._sharding_types):
            theirs = self._output_dists[index]
            arguments = (
                _column_groups(sharding_type, theirs, world_size),
                self._env.rank,
                self._exchange(sharding_type, "embeddings"),
                self._exchange(sharding_type, "gradients"),
                _gradient_divisors(sharding_type, theirs, world_size),
                # Column-wise, TorchRec puts the columns of a table together again.
                getattr(theirs, "_callbacks", None) or [],
            )
            if codecs is None:
                self._output_dists[index] = PooledOutputDist(*arguments)
            else:
                plan = plan_codecs(codecs, self._embedding_shardings[index])
                self._output_dists[index] = CodedPooledOutputDist(
                    plan, codecs.non_finite, *arguments
                )

    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        if self._has_mean_pooling_callback or self._enabled_feature_score_auto_collection:
            return None  # TorchRec's input_dist computes more than the exchange
        shardings = zip(self._sharding_types, self._embedding_shardings, strict=True)
        return plan_routes(keys, shardings, self._input_dists)

    def _sharding_context(
        self, route: Route, features: KeyedJaggedTensor
    ) -> EmbeddingShardingContext:
        return EmbeddingShardingContext(
            batch_size_per_feature_pre_a2a=[features.stride()] * len(route.order)
        )

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Any]:
        """Posts the ids of a batch; see BoundedLagModule."""
        mean_pooling: bool = self._has_mean_pooling_callback  # type: ignore[has-type]
        if not (
            mean_pooling and isinstance(features, KeyedJaggedTensor) and features.stride() == 0
        ):
            return super().input_dist(ctx, features)
        # TorchRec cannot compute the divisors of a batch without samples, which need none.
        first_batch = self._has_uninitialized_input_dist
        self._has_mean_pooling_callback = False
        try:
            awaitable = super().input_dist(ctx, features)
        finally:
            self._has_mean_pooling_callback = mean_pooling
        self._bls_routes = None  # planned, if at all, as if there were no mean pooling
        if first_batch:
            self._init_mean_pooling_callback(features.keys(), None)
        ctx.divisor = torch.ones(())
        return awaitable

    @outside_inference_mode
    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up and posts; see TorchRec."""
        if not self._only_sums_rows(ctx, input):
            return super().compute_and_output_dist(ctx, input)
        return EmbeddingBagCollectionAwaitable(
            awaitables=[
                output_dist.look_up_and_post(tables, ids, context)
                for output_dist, tables, ids, context in zip(
                    self._output_dists,
                    self._lookup_tables(),
                    input,
                    ctx.sharding_contexts,
                    strict=True,
                )
            ],
            embedding_dims=self._embedding_dims,
            embedding_names=self._embedding_names,
        )

    def update_shards(
        self,
        changed_sharding_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Moves shards, with their optimizer states; DistributedModelParallel.reshard calls it.

        The arguments and errors are those of `reshard`.
        """
        reshard(self, changed_sharding_params, env, device)

    def _only_sums_rows(self, ctx: Any, input: Any) -> bool:
        mean_pooling: bool = self._has_mean_pooling_callback
        return (
            self._may_skip_lookups()
            and not mean_pooling
            and not ctx.variable_batch_per_feature
            and all(ids.weights_or_none() is None for ids in input)
            and all(sums_rows(lookup) for lookup in self._lookups)
        )


class BLSEmbeddingBagCollectionSharder(
    BoundedLagSharder,
    EmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards EmbeddingBagCollections with bounded-lag exchanges.

    Table-, row-, column- and table-row-wise; sum and mean pooling; weighted or not. The
    arguments are those of BoundedLagSharder.
    """

    _sharding_types = (
        ShardingType.TABLE_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
    )
    _kernels = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
    _sharded_module = BLSEmbeddingBagCollection
