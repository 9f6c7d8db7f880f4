"""EmbeddingBagCollection, sharded with bounded-lag exchanges."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    construct_output_kt,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_bls.direct.reads.pooled_output import PooledOutput, SumDivision
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.data_parallel import exchanged, is_replicated
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.initial_weights import load_initial_weights
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.routes import Route, plan_routes
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.variable_batch import spread
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedPooledOutputDist
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.pooled_output_dist import ColumnGroup, PooledOutputDist
from torchrec_bls.distributed.outputs.shared_means import (
    Misdivided,
    correct,
    find_misdivided,
)
from torchrec_bls.distributed.outputs.training_iterations import keep_in_checkpoints
from torchrec_bls.distributed.reshard import reshard
from torchrec_bls.distributed.sharded_module import BoundedLagModule
from torchrec_bls.distributed.sharder import BoundedLagSharder, sharding_group

# Rows are cut over the ranks of a node. So these ranks have partial sums of the same columns.
_BY_NODE = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
_NONE_OR_FLOATS = (0, torch.float32.itemsize)
# For tables of these types TorchRec makes means from sums.
_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def _column_groups(sharding_type: str, theirs: Any, world_size: int) -> list[ColumnGroup]:
    """Reads from TorchRec's output dist which ranks compute which columns."""
    if sharding_type == ShardingType.ROW_WISE.value:
        return [ColumnGroup(0, world_size, sum(theirs._embedding_dims))]
    if sharding_type in _BY_NODE:
        local_size = theirs._intra_pg.size()
        return [
            ColumnGroup(node * local_size, local_size, width)
            for node, width in enumerate(theirs._dim_sum_per_node)
        ]
    return [ColumnGroup(rank, 1, width) for rank, width in enumerate(theirs._dim_sum_per_rank)]


def _gradient_divisors(sharding_type: str, theirs: Any, world_size: int) -> list[int]:
    if sharding_type in _BY_NODE:
        # TorchRec divides in the backward of both of its exchanges.
        return [theirs._cross_pg.size(), theirs._intra_pg.size()]
    return [world_size]


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


class BLSEmbeddingBagCollection(
    BoundedLagModule,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """TorchRec's ShardedEmbeddingBagCollection that exchanges through bounded-lag channels."""

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        **kwargs: Any,
    ) -> None:
        self._init_bounded_lag(
            config,
            sharding_group(env),
            module_fqn,
            module.embedding_bag_configs(),
            params,
            module.is_weighted(),
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)
        if config.codecs is not None and config.codecs.decays:
            keep_in_checkpoints(self)
        load_initial_weights(self, module)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        shardings = zip(self._sharding_types, self._embedding_shardings, strict=True)
        self._swap_ids_dists(shardings, self._input_dists, pooled=True)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        world_size = self._env.world_size
        codecs = self._bls.exchanges.config.codecs
        for index, sharding_type in enumerate(self._sharding_types):
            if not exchanged([sharding_type]):
                continue
            theirs = self._output_dists[index]
            arguments = (
                _column_groups(sharding_type, theirs, world_size),
                self._env.rank,
                self._bls.exchanges.of(sharding_type, "embeddings"),
                self._bls.exchanges.of(sharding_type, "gradients"),
                _gradient_divisors(sharding_type, theirs, world_size),
                # For column-wise sharding TorchRec puts the columns of a table together again.
                getattr(theirs, "_callbacks", None) or [],
            )
            if codecs is None:
                self._output_dists[index] = PooledOutputDist(*arguments)
            else:
                plan = self._codec_plan(self._embedding_shardings[index])
                self._output_dists[index] = CodedPooledOutputDist(
                    plan, codecs.non_finite, lambda: self._bls.iterations, *arguments
                )
        self._misdivided = self._find_misdivided()

    def _find_misdivided(self) -> Misdivided:
        plan = self.module_sharding_plan
        by_rows = [table for table in self._tables() if plan[table.name].sharding_type in _BY_ROWS]
        features = [name for each in self._embedding_shardings for name in each.feature_names()]
        found = find_misdivided(by_rows, features, self._embedding_names)
        if any(found) and self._env.rank == 0:  # all ranks have the same plan
            warnings.warn(
                f"{self._bls.exchanges.name}: features are looked up in tables with sum and with "
                f"mean pooling, sharded by rows. TorchRec leaves the means {list(found.means)} "
                f"undivided there, and divides the sums {found.sums}. Here they are right, so that "
                "results differ from TorchRec's",
                stacklevel=4,
            )
        return found

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

    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        if batch.varying is not None:
            keys, indices = batch.varying.inverse_indices()
            ctx.bls_inverse_indices = keys, indices.clone()  # of the caller's memory
            batch = batch._replace(varying=None)
        mean_pooling: bool = self._has_mean_pooling_callback  # type: ignore[has-type]
        if not (mean_pooling and batch.features.stride() == 0):
            awaitable = super()._post_ids(ctx, batch)
            if any(self._misdivided):
                names, dims = self._embedding_names, self._embedding_dims
                correct(ctx.divisor, self._misdivided, names, dims, batch.features)
            return awaitable
        # TorchRec cannot compute the divisors of a batch without samples, which need none.
        first_batch = self._has_uninitialized_input_dist
        self._has_mean_pooling_callback = False
        try:
            awaitable = super()._post_ids(ctx, batch)
        finally:
            self._has_mean_pooling_callback = mean_pooling
        self._bls.routes = None  # if routes are planned, that ignores mean pooling
        if first_batch:
            self._init_mean_pooling_callback(batch.features.keys(), None)
        ctx.divisor = torch.ones(())
        return awaitable

    def _init_mean_pooling_callback(
        self, input_feature_names: list[str], inverse_indices: Any
    ) -> None:
        """Does the work of TorchRec's, which takes a feature named "f@x" for f."""
        names = [name for each in self._embedding_shardings for name in each.feature_names()]
        for place, name in enumerate(names):
            self._kjt_key_indices.setdefault(name, place)
        features = [self._bls.features_of_names[name] for name in self._embedding_names]
        self._kt_key_ordering = torch.tensor([self._kjt_key_indices[each] for each in features])

    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[KeyedTensor]:
        awaitable = (
            self._look_up_and_post(ctx, input)
            if self._only_sums_rows(ctx, input)
            else ShardedEmbeddingBagCollection.compute_and_output_dist(self, ctx, input)
        )
        inverse = getattr(ctx, "bls_inverse_indices", None)
        if inverse is not None:
            awaitable.callbacks.append(
                partial(spread, inverse=inverse, features=self._bls.features_of_names)
            )
        return awaitable

    def _look_up_and_post(self, ctx: Any, input: Any) -> EmbeddingBagCollectionAwaitable:
        return _PooledEmbeddings(
            awaitables=[
                output_dist(lookup(ids), context)
                if is_replicated(lookup)
                else output_dist.look_up_and_post(tables, ids, context)
                for output_dist, lookup, tables, ids, context in zip(
                    self._output_dists,
                    self._lookups,
                    self._lookup_tables(),
                    input,
                    ctx.sharding_contexts,
                    strict=True,
                )
            ],
            embedding_dims=self._embedding_dims,
            embedding_names=self._embedding_names,
        )

    def _is_plain(self, tables: LookupTables) -> bool:
        return tables.sums_rows()

    def _output_form(self) -> PooledOutput:
        means = [
            table.name
            for table in self._tables()
            if table.pooling == PoolingType.MEAN
            # A callback of TorchRec makes means from the sums of all ranks.
            and self.module_sharding_plan[table.name].sharding_type not in _BY_ROWS
        ]
        division = None
        if self._has_mean_pooling_callback:
            division = SumDivision(
                [name for each in self._embedding_shardings for name in each.feature_names()],
                list(self._pooling_type_to_rs_features[PoolingType.SUM.value]),
                self._misdivided,
            )
        features = [self._bls.features_of_names[name] for name in self._embedding_names]
        return PooledOutput(self._embedding_names, self._embedding_dims, features, means, division)

    def update_shards(
        self,
        changed_sharding_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Moves shards, with their optimizer states. DistributedModelParallel.reshard calls it.

        The arguments and errors are those of `reshard`.
        """
        reshard(self, changed_sharding_params, env, device)

    def _only_sums_rows(self, ctx: Any, input: Any) -> bool:
        mean_pooling: bool = self._has_mean_pooling_callback
        return (
            self._may_skip_lookups()
            and not mean_pooling
            and all(
                is_replicated(lookup) or (_can_be_summed(ids) and tables.sums_rows())
                for lookup, tables, ids in zip(
                    self._lookups, self._lookup_tables(), input, strict=True
                )
            )
        )


class BLSEmbeddingBagCollectionSharder(
    BoundedLagSharder,
    EmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards EmbeddingBagCollections with bounded-lag exchanges.

    It knows the sharding types table-, row-, column-, table-row- and table-column-wise, grid, and
    data-parallel; sum and mean pooling; weighted or not. The arguments are BoundedLagSharder's.
    """

    _sharding_types = (
        ShardingType.TABLE_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.TABLE_COLUMN_WISE.value,
        ShardingType.GRID_SHARD.value,
        ShardingType.DATA_PARALLEL.value,
    )
    _kernels = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
    _refused: ClassVar[Mapping[str, str]] = {
        EmbeddingComputeKernel.FUSED.value: "a fused optimizer would give each replica the updates "
        "of its own rank alone",
    }
    _sharded_module = BLSEmbeddingBagCollection

    def _check_plan(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> None:
        super()._check_plan(module, params)
        tables: Any = module
        means, others = [], []
        for table in tables.embedding_bag_configs():
            sharding_type = params[table.name].sharding_type
            if sharding_type not in _BY_ROWS:
                others.append(table.name)
            elif table.pooling == PoolingType.MEAN:
                means.append(table.name)
            if sharding_type == ShardingType.GRID_SHARD.value and table.pooling == PoolingType.MEAN:
                raise ValueError(
                    f"{type(self).__name__}: table '{table.name}' has mean pooling and is planned "
                    f"with sharding type {sharding_type}, for which TorchRec adds up the means of "
                    "the ranks' rows: use table_row_wise, or sum pooling"
                )
        if means and others and dist.get_rank() == 0:  # all ranks have the same plan
            warnings.warn(
                f"{type(self).__name__}: tables {means} have mean pooling and are sharded by rows, "
                f"and {others} are not. TorchRec then divides the sums and means of these by their "
                "lengths as well, and so do the modules here: shard all tables of the collection "
                f"by rows, none with mean pooling, or give {means} a collection of their own",
                stacklevel=3,
            )
