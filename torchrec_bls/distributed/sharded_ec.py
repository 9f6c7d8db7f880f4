"""EmbeddingCollection, sharded with bounded-lag exchanges."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
    get_ec_index_dedup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_bls.direct.reads.row_output import RowOutput
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.initial_weights import load_initial_weights
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.routes import Route, RoutedIdsAwaitable, plan_routes
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedSequenceOutputDist
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import CutEmbeddings, LazyJaggedTensor
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.sample_rows import choose_rows_with_gradients
from torchrec_bls.distributed.outputs.sequence_output_dist import SequenceOutputDist
from torchrec_bls.distributed.outputs.training_iterations import keep_in_checkpoints
from torchrec_bls.distributed.sharded_module import BoundedLagModule
from torchrec_bls.distributed.sharder import BoundedLagSharder, sharding_group

_NO_DEDUP = (
    "ids can't be deduplicated (use_index_dedup): FBGEMM does that on GPUs alone, its "
    "jagged_unique_indices has no kernel for the CPU. Leave it off"
)


class BLSEmbeddingCollection(BoundedLagModule, ShardedEmbeddingCollection):  # type: ignore[misc]
    """TorchRec's ShardedEmbeddingCollection that exchanges through bounded-lag channels."""

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        **kwargs: Any,
    ) -> None:
        if get_ec_index_dedup():
            raise ValueError(f"{_NO_DEDUP}: set_ec_index_dedup(False)")
        self._init_bounded_lag(
            config, sharding_group(env), module_fqn, module.embedding_configs(), params, False
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)
        if config.codecs is not None and config.codecs.decays:
            keep_in_checkpoints(self)
        if module.device.type == "meta":
            load_initial_weights(self, module)  # otherwise TorchRec has loaded them

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        shardings = self._sharding_type_to_sharding.items()
        self._swap_ids_dists(shardings, self._input_dists, pooled=False)

    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        if batch.varying is not None and batch.varying.inverse_indices()[1].shape[1] == 0:
            batch = self.nothing()  # no sample has any of its rows, and TorchRec cannot do that
        awaitable = super()._post_ids(ctx, batch)
        choose_rows_with_gradients(ctx)
        return awaitable

    def _create_output_dist(self) -> None:
        codecs = self._bls.exchanges.config.codecs
        for sharding_type, sharding in self._sharding_type_to_sharding.items():
            arguments = (
                self._env.rank,
                self._bls.exchanges.of(sharding_type, "embeddings"),
                self._bls.exchanges.of(sharding_type, "gradients"),
                [self._env.world_size],
            )
            self._output_dists.append(
                SequenceOutputDist(*arguments)
                if codecs is None
                else CodedSequenceOutputDist(
                    self._codec_plan(sharding),
                    codecs.non_finite,
                    lambda: self._bls.iterations,
                    *arguments,
                )
            )

    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        shardings = self._sharding_type_to_sharding
        if (
            self._need_indices
            or self._enabled_feature_score_auto_collection
            or ShardingType.COLUMN_WISE.value in shardings
        ):
            return None  # TorchRec does more with the batch than _RoutedEmbeddings can
        return plan_routes(keys, shardings.items(), self._input_dists)

    def _post_along_routes(
        self, routes: list[Route], ctx: Any, batch: CheckedBatch
    ) -> RoutedIdsAwaitable:
        lengths = batch.features.lengths().clone()  # of the caller's memory
        lengths = lengths.view(len(batch.counts), batch.features.stride())
        ctx.bls_routed = routes, lengths, batch.counts
        return super()._post_along_routes(routes, ctx, batch)

    def _kept(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return kept(features)  # the output has its lengths, and may have its ids

    def _sharding_context(
        self, route: Route, features: KeyedJaggedTensor
    ) -> SequenceShardingContext:
        return SequenceShardingContext(
            features_before_input_dist=features,
            unbucketize_permute_tensor=route.unbucketize_permute,
        )

    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """See BoundedLagModule. TorchRec's method cannot do batches without samples."""
        features = ctx.sharding_contexts[0].features_before_input_dist
        routed = getattr(ctx, "bls_routed", None)
        if routed is not None and self._only_copies_rows(input):
            sent = self._look_up_and_post(ctx, input)
        elif all(ids.stride() > 0 for ids in input):
            awaitable = ShardedEmbeddingCollection.compute_and_output_dist(self, ctx, input)
            sent = awaitable._awaitables_per_sharding
        else:
            sent = self._post_no_rows(ctx)
        if routed is not None:
            return _RoutedEmbeddings(sent, self._embedding_names_per_sharding, *routed)
        if features.stride() > 0:
            return awaitable
        names = [name for names in self._embedding_names_per_sharding for name in names]
        indices = features.values()[:0] if self._need_indices else None
        return _EmptyBatchAwaitable(sent, names, self._embedding_dim, indices)

    def _only_copies_rows(self, input: Any) -> bool:
        return (
            self._may_skip_lookups()
            and all(isinstance(ids, ArrivedFeatures) for ids in input)
            and all(tables.copies_rows() for tables in self._lookup_tables())
        )

    def _look_up_and_post(self, ctx: Any, input: Any) -> list[Awaitable[torch.Tensor]]:
        return [
            output_dist.look_up_and_post(
                tables, self._embedding_dim_for_sharding_type(kind), ids, context
            )
            for output_dist, tables, kind, ids, context in zip(
                self._output_dists,
                self._lookup_tables(),
                self._sharding_type_to_sharding,
                input,
                ctx.sharding_contexts,
                strict=True,
            )
        ]

    def _is_plain(self, tables: LookupTables) -> bool:
        return tables.copies_rows()

    def _output_form(self) -> RowOutput:
        names = dict.fromkeys(
            name for names in self._embedding_names_per_sharding for name in names
        )
        return RowOutput(names, self._embedding_dim, self._need_indices)

    def _post_no_rows(self, ctx: Any) -> list[Awaitable[torch.Tensor]]:
        return [
            output_dist(torch.empty(0, self._embedding_dim_for_sharding_type(kind)), context)
            for output_dist, kind, context in zip(
                self._output_dists,
                self._sharding_type_to_sharding,
                ctx.sharding_contexts,
                strict=True,
            )
        ]


class _RoutedEmbeddings(
    ExchangeAwaitable[dict[str, JaggedTensor]],
    LazyAwaitable[dict[str, JaggedTensor]],  # type: ignore[misc]
):
    """The embeddings by name, cut up by the lengths of the original batch."""

    def __init__(
        self,
        awaitables: list[Awaitable[torch.Tensor]],
        names: list[list[str]],
        routes: list[Route],
        lengths: torch.Tensor,
        counts: list[int],
    ) -> None:
        super().__init__()
        self._awaitables_per_sharding = awaitables
        self._routes = routes
        self._names = names
        self._lengths = lengths
        self._counts = counts

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        embeddings: dict[str, JaggedTensor] = {}
        for awaitable, route, names in zip(
            self._awaitables_per_sharding, self._routes, self._names, strict=True
        ):
            cut = CutEmbeddings(awaitable.wait(), self._lengths, route.order, self._counts)
            for place, name in enumerate(names):
                embeddings[name] = LazyJaggedTensor.at(cut, place)
        return embeddings


class _EmptyBatchAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):  # type: ignore[misc]
    """The embeddings of a rank without samples. The rank still answers the other ranks' ids."""

    def __init__(
        self,
        awaitables: list[Awaitable[torch.Tensor]],
        names: list[str],
        dim: int,
        indices: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self._awaitables_per_sharding = awaitables
        self._names = names
        self._dim = dim
        self._indices = indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        rows = [awaitable.wait() for awaitable in self._awaitables_per_sharding]
        # It is part of the autograd graph, so that a backward answers the other ranks' gradients.
        values = sum((r.sum() for r in rows), torch.zeros(())).expand(0, self._dim)
        lengths = torch.zeros(0, dtype=torch.int32)
        return {
            # TorchRec, too, gives the ids as weights.
            name: JaggedTensor(values=values, lengths=lengths, weights=self._indices)
            for name in self._names
        }


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

    def __init__(self, *args: Any, use_index_dedup: bool = False, **kwargs: Any) -> None:
        if use_index_dedup:
            raise ValueError(_NO_DEDUP)
        super().__init__(*args, **kwargs)

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
