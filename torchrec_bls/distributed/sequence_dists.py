"""The dists of an EmbeddingCollection."""

from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_bls.direct.reads.row_output import RowOutput
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.inputs.routes import Route, RoutedIdsAwaitable, plan_routes
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import CutEmbeddings, LazyJaggedTensor
from torchrec_bls.distributed.outputs.sample_rows import choose_rows_with_gradients
from torchrec_bls.distributed.torchrec_dists import TorchRecDists


class SequenceDists(TorchRecDists):
    """Sends the rows of all ids."""

    _theirs: ClassVar[Any] = ShardedEmbeddingCollection

    def post(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """See Dists."""
        if batch.varying is not None and batch.varying.inverse_indices()[1].shape[1] == 0:
            # No sample has any of its rows, and TorchRec cannot do that.
            batch = self._state.input_check.nothing()
        awaitable = super().post(ctx, batch)
        choose_rows_with_gradients(ctx)
        return awaitable

    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        shardings = self.module._sharding_type_to_sharding
        if (
            self.module._need_indices
            or self.module._enabled_feature_score_auto_collection
            or ShardingType.COLUMN_WISE.value in shardings
        ):
            return None  # TorchRec does more with the batch than _RoutedEmbeddings can
        return plan_routes(keys, shardings.items(), self.module._input_dists)

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

    def _embeddings(self, ctx: Any, input: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """See TorchRecDists. TorchRec's method cannot do batches without samples."""
        features = ctx.sharding_contexts[0].features_before_input_dist
        routed = getattr(ctx, "bls_routed", None)
        if routed is not None and self._only_copies_rows(input):
            sent = self._look_up_and_post(ctx, input)
        elif all(ids.stride() > 0 for ids in input):
            awaitable = self._theirs.compute_and_output_dist(self.module, ctx, input)
            sent = awaitable._awaitables_per_sharding
        else:
            sent = self._post_no_rows(ctx)
        if routed is not None:
            return _RoutedEmbeddings(sent, self.module._embedding_names_per_sharding, *routed)
        if features.stride() > 0:
            return awaitable
        names = [name for names in self.module._embedding_names_per_sharding for name in names]
        indices = features.values()[:0] if self.module._need_indices else None
        return _EmptyBatchAwaitable(sent, names, self.module._embedding_dim, indices)

    def _only_copies_rows(self, input: Any) -> bool:
        return (
            self._may_skip_lookups()
            and all(isinstance(ids, ArrivedFeatures) for ids in input)
            and all(tables.copies_rows() for tables in self.lookup_tables)
        )

    def _look_up_and_post(self, ctx: Any, input: Any) -> list[Awaitable[torch.Tensor]]:
        return [
            output_dist.look_up_and_post(
                tables, self.module._embedding_dim_for_sharding_type(kind), ids, context
            )
            for output_dist, tables, kind, ids, context in zip(
                self.module._output_dists,
                self.lookup_tables,
                self.module._sharding_type_to_sharding,
                input,
                ctx.sharding_contexts,
                strict=True,
            )
        ]

    @property
    def only_read(self) -> bool:
        """See TorchRecDists."""
        return all(tables.copies_rows() for tables in self.lookup_tables)

    def output_form(self) -> RowOutput:
        """See TorchRecDists."""
        names = dict.fromkeys(
            name for names in self.module._embedding_names_per_sharding for name in names
        )
        return RowOutput(names, self.module._embedding_dim, self.module._need_indices)

    def _post_no_rows(self, ctx: Any) -> list[Awaitable[torch.Tensor]]:
        return [
            output_dist(torch.empty(0, self.module._embedding_dim_for_sharding_type(kind)), context)
            for output_dist, kind, context in zip(
                self.module._output_dists,
                self.module._sharding_type_to_sharding,
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
