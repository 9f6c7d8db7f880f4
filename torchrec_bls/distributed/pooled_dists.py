"""The dists of an EmbeddingBagCollection."""

from functools import partial
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    ShardedEmbeddingBagCollection,
    construct_output_kt,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_bls.direct.reads.pooled_output import PooledOutput, SumDivision
from torchrec_bls.distributed.data_parallel import is_replicated
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.routes import Route, plan_routes
from torchrec_bls.distributed.inputs.variable_batch import spread
from torchrec_bls.distributed.outputs.shared_means import correct
from torchrec_bls.distributed.torchrec_dists import TorchRecDists

_NONE_OR_FLOATS = (0, torch.float32.itemsize)
#: For tables of these types TorchRec makes means from sums.
BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def _can_be_summed(ids: object) -> bool:
    """Returns whether the ids are as they arrived, and whether a lookup can use their weights as
    they are, if there are any."""
    return isinstance(ids, ArrivedFeatures) and ids.native.weight_bytes in _NONE_OR_FLOATS


class _PooledEmbeddings(
    ExchangeAwaitable[KeyedTensor],
    EmbeddingBagCollectionAwaitable,  # type: ignore[misc]
):
    """TorchRec's awaitable of a forward's output, without profiler ranges."""

    def _wait_impl(self) -> KeyedTensor:
        return construct_output_kt(
            embeddings=[awaitable.wait() for awaitable in self._awaitables],
            embedding_names=self._embedding_names,
            embedding_dims=self._embedding_dims,
        )


class PooledDists(TorchRecDists):
    """Sends sums of rows, and makes means where TorchRec does."""

    _theirs: ClassVar[Any] = ShardedEmbeddingBagCollection

    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        module = self.module
        # TorchRec 1.6 has no such scores of pooled features.
        collects_scores = getattr(module, "_enabled_feature_score_auto_collection", False)
        if module._has_mean_pooling_callback or collects_scores:
            return None  # TorchRec's input_dist computes more than the exchange
        shardings = zip(module._sharding_types, module._embedding_shardings, strict=True)
        return plan_routes(keys, shardings, module._input_dists)

    def _sharding_context(
        self, route: Route, features: KeyedJaggedTensor
    ) -> EmbeddingShardingContext:
        return EmbeddingShardingContext(
            batch_size_per_feature_pre_a2a=[features.stride()] * len(route.order)
        )

    def post(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """See Dists."""
        if batch.varying is not None:
            keys, indices = batch.varying.inverse_indices()
            ctx.bls_inverse_indices = keys, indices.clone()  # of the caller's memory
            batch = batch._replace(varying=None)
        module = self.module
        mean_pooling: bool = module._has_mean_pooling_callback
        if not (mean_pooling and batch.features.stride() == 0):
            awaitable = super().post(ctx, batch)
            if any(module._misdivided):
                names, dims = module._embedding_names, module._embedding_dims
                correct(ctx.divisor, module._misdivided, names, dims, batch.features)
            return awaitable
        # TorchRec cannot compute the divisors of a batch without samples, which need none.
        first_batch = module._has_uninitialized_input_dist
        module._has_mean_pooling_callback = False
        try:
            awaitable = super().post(ctx, batch)
        finally:
            module._has_mean_pooling_callback = mean_pooling
        self._routes = None  # if routes are planned, that ignores mean pooling
        if first_batch:
            module._init_mean_pooling_callback(batch.features.keys(), None)
        ctx.divisor = torch.ones(())
        return awaitable

    def _embeddings(self, ctx: Any, input: Any) -> LazyAwaitable[KeyedTensor]:
        awaitable = (
            self._look_up_and_post(ctx, input)
            if self._only_sums_rows(ctx, input)
            else self._theirs.compute_and_output_dist(self.module, ctx, input)
        )
        inverse = getattr(ctx, "bls_inverse_indices", None)
        if inverse is not None:
            awaitable.callbacks.append(
                partial(spread, inverse=inverse, features=self._state.features_of_names)
            )
        return awaitable

    def _look_up_and_post(self, ctx: Any, input: Any) -> EmbeddingBagCollectionAwaitable:
        return _PooledEmbeddings(
            awaitables=[
                output_dist(lookup(ids), context)
                if is_replicated(lookup)
                else output_dist.look_up_and_post(tables, ids, context)
                for output_dist, lookup, tables, ids, context in zip(
                    self.module._output_dists,
                    self.module._lookups,
                    self.lookup_tables,
                    input,
                    ctx.sharding_contexts,
                    strict=True,
                )
            ],
            embedding_dims=self.module._embedding_dims,
            embedding_names=self.module._embedding_names,
        )

    @property
    def only_read(self) -> bool:
        """See TorchRecDists."""
        return all(tables.sums_rows() for tables in self.lookup_tables)

    def output_form(self) -> PooledOutput:
        """See TorchRecDists."""
        module = self.module
        means = [
            table.name
            for table in self.tables
            if table.pooling == PoolingType.MEAN
            # A callback of TorchRec makes means from the sums of all ranks.
            and module.module_sharding_plan[table.name].sharding_type not in BY_ROWS
        ]
        division = None
        if module._has_mean_pooling_callback:
            division = SumDivision(
                [name for each in module._embedding_shardings for name in each.feature_names()],
                list(module._pooling_type_to_rs_features[PoolingType.SUM.value]),
                module._misdivided,
            )
        features = [self._state.features_of_names[name] for name in module._embedding_names]
        return PooledOutput(
            module._embedding_names, module._embedding_dims, features, means, division
        )

    def _only_sums_rows(self, ctx: Any, input: Any) -> bool:
        mean_pooling: bool = self.module._has_mean_pooling_callback
        return (
            self._may_skip_lookups()
            and not mean_pooling
            and all(
                is_replicated(lookup) or (_can_be_summed(ids) and tables.sums_rows())
                for lookup, tables, ids in zip(
                    self.module._lookups, self.lookup_tables, input, strict=True
                )
            )
        )
