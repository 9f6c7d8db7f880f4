"""EmbeddingBagCollection, sharded with bounded-lag exchanges."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.codec_config import has_decay
from torchrec_bls.distributed.config import BLSConfig, name_of_module
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.initial_weights import load_initial_weights
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.lookup_choice import chosen_lookup
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedPooledOutputDist
from torchrec_bls.distributed.outputs.pooled_output_dist import ColumnGroup, PooledOutputDist
from torchrec_bls.distributed.outputs.shared_means import Misdivided, find_misdivided
from torchrec_bls.distributed.outputs.training_iterations import keep_in_checkpoints
from torchrec_bls.distributed.pooled_dists import BY_ROWS, PooledDists
from torchrec_bls.distributed.reshard import reshard
from torchrec_bls.distributed.sharder import BoundedLagSharder, sharding_group
from torchrec_bls.distributed.torchrec_dists import FirstBatchMark, codec_plan, swap_ids_dists

# Rows are cut over the ranks of a node. So these ranks have partial sums of the same columns.
_BY_NODE = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


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


class BLSEmbeddingBagCollection(
    BoundedLagModule,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """TorchRec's ShardedEmbeddingBagCollection that exchanges through bounded-lag channels."""

    _has_uninitialized_input_dist = FirstBatchMark()

    def __init__(
        self,
        config: BLSConfig,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        module_fqn: str | None,
        gpu: Gpu | None = None,
        **kwargs: Any,
    ) -> None:
        self._init_bounded_lag(
            config,
            sharding_group(env),
            name_of_module(config, module_fqn or type(self).__name__),
            module.embedding_bag_configs(),
            params,
            module.is_weighted(),
            gpu=gpu,
        )
        super().__init__(module, params, env, module_fqn=module_fqn, **kwargs)
        if config.codecs is not None and has_decay(config.codecs):
            keep_in_checkpoints(self)
        load_initial_weights(self, module)

    def _choose(self) -> Lookup:
        return chosen_lookup(PooledDists(self, self._bls), self._bls)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        shardings = zip(self._sharding_types, self._embedding_shardings, strict=True)
        swap_ids_dists(self._bls, shardings, self._input_dists, pooled=True)

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
                self._bls.empty_output,
            )
            if codecs is None:
                self._output_dists[index] = PooledOutputDist(*arguments)
            else:
                plan = codec_plan(self._bls, self._embedding_shardings[index])
                self._output_dists[index] = CodedPooledOutputDist(
                    plan, codecs.non_finite, lambda: self._bls.iterations, *arguments
                )
        self._misdivided = self._find_misdivided()

    def _find_misdivided(self) -> Misdivided:
        plan = self.module_sharding_plan
        by_rows = [table for table in self._bls.tables if plan[table.name].sharding_type in BY_ROWS]
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

    def _init_mean_pooling_callback(
        self, input_feature_names: list[str], inverse_indices: Any
    ) -> None:
        """Does the work of TorchRec's, which takes a feature named "f@x" for f."""
        names = [name for each in self._embedding_shardings for name in each.feature_names()]
        for place, name in enumerate(names):
            self._kjt_key_indices.setdefault(name, place)
        features = [self._bls.features_of_names[name] for name in self._embedding_names]
        self._kt_key_ordering = torch.tensor([self._kjt_key_indices[each] for each in features])

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

    def _check_plan(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        possible_kernels: Sequence[str],
    ) -> None:
        super()._check_plan(module, params, possible_kernels)
        tables: Any = module
        means, others = [], []
        for table in tables.embedding_bag_configs():
            sharding_type = params[table.name].sharding_type
            if sharding_type not in BY_ROWS:
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
