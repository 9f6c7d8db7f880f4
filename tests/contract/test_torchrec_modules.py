"""What the sharded modules here count on inside TorchRec's, seam by seam.

A TorchRec that changes one of them fails here with its name, not elsewhere with a wrong result.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_sharding import (
    KJTListSplitsAwaitable,
    _set_sharding_context_intra_a2a,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import ShardingType

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
NODES = 2


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def sharded_by_torchrec(kind: models.Kind) -> Any:
    """Returns TorchRec's own sharded module, all sharding types, two ranks on two nodes."""
    models.set_nodes(NODES)
    model: DistributedModelParallel = models.shard(kind, "mixed", kind.torchrec_sharder(), NODES)
    return model.module.embeddings


def forward(module: Any, rank: int, kind: models.Kind) -> tuple[Any, Any]:
    """Returns context and output of a forward stage by stage, as the pipeline does it."""
    with torch.no_grad():
        context = module.create_context()
        args, kwargs = module.preprocess_input((models.make_ids(kind, rank, 3),), {})
        ids = module.input_dist(context, *args, **kwargs).wait().wait()
        return context, module.compute_and_output_dist(context, ids)


@pytest.mark.parametrize(
    ("sharded", "arguments"),
    [
        (ShardedEmbeddingCollection, ["fused_params", "device", "module_fqn"]),
        (ShardedEmbeddingBagCollection, ["fused_params", "device", "module_fqn"]),
    ],
)
def test_constructors_of_sharded_modules(sharded: type, arguments: list[str]) -> None:
    names = parameters_of(sharded.__init__)
    assert names[:4] == ["self", "module", "table_name_to_parameter_sharding", "env"]
    assert set(arguments) <= set(names)


@pytest.mark.parametrize("sharder", [EmbeddingCollectionSharder, EmbeddingBagCollectionSharder])
def test_sharders(sharder: type) -> None:
    assert parameters_of(sharder.__init__)[1:3] == ["fused_params", "qcomm_codecs_registry"]
    assert parameters_of(sharder.shard) == [
        "self",
        "module",
        "params",
        "env",
        "device",
        "module_fqn",
    ]
    assert parameters_of(sharder.sharding_types) == ["self", "compute_device_type"]
    assert sharder({"learning_rate": 1.0}).fused_params["learning_rate"] == 1.0


def test_names_of_sharding_types_and_kernels() -> None:
    assert [
        ShardingType.TABLE_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
    ] == ["table_wise", "row_wise", "column_wise", "table_row_wise"]
    assert EmbeddingComputeKernel.FUSED.value == "fused"
    assert EmbeddingComputeKernel.DENSE.value == "dense"


def dists_are_created(rank: int, kind: models.Kind) -> None:
    calls: list[str] = []
    classes = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)
    for name in ("_create_input_dist", "_create_output_dist"):
        for sharded in classes:
            original = getattr(sharded, name)

            def note(self: Any, *args: Any, _name: str = name, _call: Any = original, **kw: Any):
                calls.append(_name)
                return _call(self, *args, **kw)

            setattr(sharded, name, note)
    module = sharded_by_torchrec(kind)
    assert calls == ["_create_output_dist"]
    assert module._has_uninitialized_input_dist is True
    for _ in range(2):
        models.arrived(forward(module, rank, kind)[1])
    assert calls == ["_create_output_dist", "_create_input_dist"]
    assert module._has_uninitialized_input_dist is False


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_output_dists_come_with_the_module_and_input_dists_with_the_first_batch(kind: str) -> None:
    run(2, dists_are_created, KINDS[kind])


def dists_are_in_the_order_of_sharding_types(rank: int, kind: models.Kind) -> None:
    module = sharded_by_torchrec(kind)
    models.arrived(forward(module, rank, kind)[1])
    types = list(module._sharding_types)
    assert set(types) == set(models.sharding_types(kind, "mixed", NODES))
    if kind == models.EC:
        assert list(module._sharding_type_to_sharding) == types
    assert len(module._input_dists) == len(module._output_dists) == len(types)
    for sharding_type, input_dist in zip(types, module._input_dists, strict=True):
        assert isinstance(input_dist, RwSparseFeaturesDist) == (sharding_type == "row_wise")
        if sharding_type == "row_wise":
            assert hasattr(input_dist, "unbucketize_permute_tensor")
    assert module._env.world_size == 2 and module._env.rank == rank


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_dists_are_in_the_order_of_sharding_types(kind: str) -> None:
    run(2, dists_are_in_the_order_of_sharding_types, KINDS[kind])


def input_dists_keep_their_all_to_all(rank: int, kind: models.Kind) -> None:
    module = sharded_by_torchrec(kind)
    models.arrived(forward(module, rank, kind)[1])
    seen: list[list[str]] = []
    for sharding_type, input_dist in zip(module._sharding_types, module._input_dists, strict=True):
        inner = input_dist._dist
        assert isinstance(inner, KJTAllToAll)
        assert parameters_of(KJTAllToAll.__init__) == ["self", "pg", "splits", "stagger"]
        assert inner._pg.size() == len(inner._splits) == 2
        assert inner._stagger == (NODES if sharding_type == "table_row_wise" else 1)
        # What replaces it sees keys ordered by rank, and is called through the module.
        inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].keys()))
    models.arrived(forward(module, rank, kind)[1])
    assert [len(keys) for keys in seen] == [sum(d._dist._splits) for d in module._input_dists]


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_input_dists_keep_their_all_to_all_in_dist(kind: str) -> None:
    run(2, input_dists_keep_their_all_to_all, KINDS[kind])


class _Ours:
    """Awaitable that TorchRec does not know."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        return self.value


def contexts_are_filled(rank: int, kind: models.Kind) -> None:
    module = sharded_by_torchrec(kind)
    context = module.create_context()
    with torch.no_grad():
        awaitable = module.input_dist(context, models.make_ids(kind, rank, 3))
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        assert len(awaitable.awaitables) == len(context.sharding_contexts)
        assert len(context.sharding_contexts) == len(module._sharding_types)
        # Awaitables of another class are left alone, and give the list that the lookups get.
        ours = [w.wait().wait() for w in awaitable.awaitables]
        untouched = module.create_context()
        untouched.sharding_contexts.extend(type(c)() for c in context.sharding_contexts)
        defaults = [vars(c).copy() for c in untouched.sharding_contexts]
        _set_sharding_context_intra_a2a([_Ours(ids) for ids in ours], untouched)
        assert [vars(c) for c in untouched.sharding_contexts] == defaults
        ids = KJTListSplitsAwaitable([_Ours(_Ours(i)) for i in ours], untouched).wait().wait()
        assert isinstance(ids, KJTList) and list(ids) == ours
    for sharding_context in context.sharding_contexts:
        assert hasattr(sharding_context, "batch_size_per_rank")
        assert hasattr(sharding_context, "input_splits") == (kind == models.EC)
        assert hasattr(sharding_context, "output_splits") == (kind == models.EC)
        if kind == models.EC:
            assert sharding_context.features_before_input_dist.stride() == 3
            assert hasattr(sharding_context, "unbucketize_permute_tensor")
        sharding_context.bls_ids_layout = "contexts take attributes of ours"


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_contexts_of_an_input_dist(kind: str) -> None:
    run(2, contexts_are_filled, KINDS[kind])


def pooled_output_dists(rank: int) -> None:
    module = sharded_by_torchrec(models.EBC)
    types = models.sharding_types(models.EBC, "mixed", NODES)
    widths: dict[str, int] = {}
    for i, t in enumerate(types):
        tables_features = 2 if i == 3 else 1  # t3 has f3 and f0
        widths[t] = widths.get(t, 0) + tables_features * models.DIMS[i]
    by_type = dict(zip(module._sharding_types, module._output_dists, strict=True))
    assert sum(by_type["table_wise"]._dim_sum_per_rank) == widths["table_wise"]
    assert sum(by_type["column_wise"]._dim_sum_per_rank) == widths["column_wise"]
    assert sum(by_type["row_wise"]._embedding_dims) == widths["row_wise"]
    table_row_wise = by_type["table_row_wise"]
    assert sum(table_row_wise._dim_sum_per_node) == widths["table_row_wise"]
    assert len(table_row_wise._dim_sum_per_node) == NODES
    assert (table_row_wise._intra_pg.size(), table_row_wise._cross_pg.size()) == (1, NODES)
    # Column-wise tables are put together again by a function of the whole output.
    (together,) = by_type["column_wise"]._callbacks
    columns = torch.arange(float(widths["column_wise"])).expand(2, -1)
    assert sorted(together(columns.contiguous())[0].tolist()) == columns[0].tolist()
    for sharding_type in ("table_wise", "row_wise", "table_row_wise"):
        assert not getattr(by_type[sharding_type], "_callbacks", None)


def test_pooled_output_dists_say_which_rank_has_which_columns() -> None:
    run(2, pooled_output_dists)


def output_dists_are_called_with_rows_and_context(rank: int, kind: models.Kind) -> None:
    module = sharded_by_torchrec(kind)
    calls: list[tuple[Any, ...]] = []
    for output_dist in module._output_dists:
        output_dist.register_forward_pre_hook(lambda _, args: calls.append(args))
    context, output = forward(module, rank, kind)
    models.arrived(output)
    assert len(calls) == len(module._output_dists)
    for (rows, sharding_context), expected in zip(calls, context.sharding_contexts, strict=True):
        assert rows.dim() == 2 and sharding_context is expected


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_output_dists_are_called_with_rows_and_context(kind: str) -> None:
    run(2, output_dists_are_called_with_rows_and_context, KINDS[kind])


def collection_says_its_dims_and_names(rank: int) -> None:
    module = sharded_by_torchrec(models.EC)
    _, output = forward(module, rank, models.EC)
    assert len(output._awaitables_per_sharding) == len(module._sharding_types)
    names = [name for names in module._embedding_names_per_sharding for name in names]
    assert set(names) == set(models.arrived(output))
    assert module._embedding_dim == 8
    assert module._embedding_dim_for_sharding_type("table_wise") == 8
    assert module._embedding_dim_for_sharding_type("column_wise") == 4


def test_a_collection_says_its_dims_and_names() -> None:
    run(2, collection_says_its_dims_and_names)


def tables_of_a_sequence_lookup(rank: int) -> None:
    module = sharded_by_torchrec(models.EC)
    assert module.post_lookup_tracker_fn is None and module.post_odist_tracker_fn is None
    for sharding_type, lookup in zip(module._sharding_types, module._lookups, strict=True):
        assert type(lookup) is GroupedEmbeddingsLookup
        assert lookup.optim_state_tracker_fn is None
        dim = module._embedding_dim_for_sharding_type(sharding_type)
        for kernel in lookup._emb_modules:
            assert type(kernel) is BatchedFusedEmbedding
            fbgemm = kernel.emb_module
            assert type(fbgemm) is SplitTableBatchedEmbeddingBagsCodegen
            assert fbgemm.use_cpu and fbgemm.optimizer == EmbOptimType.EXACT_SGD
            assert fbgemm.weights_precision.as_int() == fbgemm.output_dtype
            tables = kernel.split_embedding_weights()
            storage = fbgemm.weights_host.untyped_storage().data_ptr()
            for table, config in zip(tables, kernel._config.embedding_tables, strict=True):
                assert table.untyped_storage().data_ptr() == storage
                assert table.is_contiguous() and table.shape == (config.local_rows, dim)
            names = [kernel._config.embedding_tables[i].name for i in kernel._feature_table_map]
            assert names == [
                table.name for table in kernel._config.embedding_tables for _ in table.feature_names
            ]
            # An unpooled lookup is the rows that the ids name, in their order.
            ids = torch.zeros(len(names), dtype=torch.int64)
            with torch.no_grad():
                rows = fbgemm(ids, torch.arange(len(names) + 1))
            expected = [tables[i][0] for i in kernel._feature_table_map]
            assert torch.equal(rows, torch.stack(expected))


def test_a_sequence_lookup_is_rows_of_tables_in_memory() -> None:
    run(2, tables_of_a_sequence_lookup)


def mean_pooling_is_a_callback(rank: int) -> None:
    for kind in (models.EBC, models.WEIGHTED):
        module = sharded_by_torchrec(kind)
        assert module._has_mean_pooling_callback is (kind == models.EBC)
        context, output = forward(module, rank, kind)
        values = models.arrived(output).values()
        if kind == models.EBC:
            assert context.divisor.shape == values.shape
    bound = inspect.signature(ShardedEmbeddingBagCollection._init_mean_pooling_callback)
    assert list(bound.parameters) == ["self", "input_feature_names", "inverse_indices"]


def test_mean_pooling_of_row_wise_tables_is_a_division_afterwards() -> None:
    run(2, mean_pooling_is_a_callback)


def test_ranks_of_a_world_are_numbered_by_node() -> None:
    for rank, (intra, cross) in enumerate(run(4, groups_of_a_node)):
        node = rank // 2
        assert (intra, cross) == ([2 * node, 2 * node + 1], [rank % 2, rank % 2 + 2])


def groups_of_a_node(rank: int) -> tuple[list[int], list[int]]:
    models.set_nodes(2)
    module: Any = models.shard(
        models.EBC, "table_row_wise", models.EBC.torchrec_sharder(), 2
    ).module.embeddings
    (output_dist,) = module._output_dists
    return (
        dist.get_process_group_ranks(output_dist._intra_pg),
        dist.get_process_group_ranks(output_dist._cross_pg),
    )


def a_forward_is_its_stages(rank: int, kind: models.Kind) -> None:
    models.set_nodes(NODES)
    model = models.shard(kind, "mixed", kind.torchrec_sharder(), NODES)
    with torch.no_grad():
        whole = models.flatten(model(models.Batch(models.make_ids(kind, rank, 3))))
    models.assert_same_bits(models.flatten(forward(model.module.embeddings, rank, kind)[1]), whole)


@pytest.mark.parametrize("kind", slow_but(["ec", "weighted"], KINDS))
def test_a_forward_is_its_stages(kind: str) -> None:
    run(2, a_forward_is_its_stages, KINDS[kind])


def test_ids_are_deduplicated_on_gpus_alone() -> None:
    # The day there is a kernel, use_index_dedup need not be refused.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_kernel("fbgemm::jagged_unique_indices", "CPU")
