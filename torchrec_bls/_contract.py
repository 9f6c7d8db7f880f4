"""The private names of torch, fbgemm and torchrec that this package uses.

TorchRec promises none of them. tests/contract/ tests their behaviour with every supported trio.
They have to exist when a name that is made for TorchRec is first used. Run as a program, the module
prints the missing names, a line each.
"""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torchrec_bls._versions import VersionError, check_packages, examine_packages

_DISTRIBUTED = "torchrec.distributed."
_FBGEMM = (
    "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
)
_FBGEMM_NBIT = (
    "fbgemm_gpu.split_table_batched_embeddings_ops_inference:"
    "IntNBitTableBatchedEmbeddingBagsCodegen"
)
_OF_COLLECTIONS = (
    "_create_input_dist",
    "_create_output_dist",
    "_device",
    "_env",
    "_feature_splits",
    "_features_order",
    "_has_uninitialized_input_dist",
    "_input_dists",
    "_lookups",
    "_output_dists",
    "_sharding_types",
    "compute_and_output_dist",
    "create_context",
    "input_dist",
    "module_sharding_plan",
    "post_lookup_tracker_fn",
    "post_odist_tracker_fn",
)

_OF_QUANTIZED = (
    "_device",
    "_emb_modules",
    "_features_order",
    "_key_to_tables",
    "_table_name_to_quantized_weights",
    "register_tbes",
)

# The key is "module" or "module:Class". The names are those of a module, or attributes of a class
# and of its instances.
CONTRACT: Mapping[str, tuple[str, ...]] = {
    "torch.autograd": ("_profiler_enabled",),
    "torch.autograd.function:BackwardCFunction": ("_set_sequence_nr",),
    "torch.distributed.distributed_c10d": ("_world",),
    "torch.distributed:ProcessGroup": (
        "_get_backend",
        "_register_backend",
        "_set_default_backend",
    ),
    "torch:Tensor": ("_version",),
    "torch.nn:Module": ("_forward_hooks", "_forward_pre_hooks"),
    _FBGEMM: (
        "get_learning_rate",
        "get_optimizer_state",
        "optimizer",
        "output_dtype",
        "pooling_mode",
        "set_learning_rate",
        "split_embedding_weights",
        "use_cpu",
        "weights_host",
        "weights_precision",
    ),
    "fbgemm_gpu.split_table_batched_embeddings_ops_inference": (
        "rounded_row_size_in_bytes",
        "unpadded_row_size_in_bytes",
    ),
    _FBGEMM_NBIT: (
        "embedding_specs",
        "feature_table_map",
        "host_size",
        "index_remapping_hash_table",
        "index_remappings_array",
        "initialize_logical_weights_placements_and_offsets",
        "output_dtype",
        "pooling_mode",
        "row_alignment",
        "scale_bias_size_in_bytes",
        "split_embedding_weights_with_scale_bias",
        "weight_initialized",
        "weights_host",
        "weights_offsets",
        "weights_physical_offsets",
    ),
    f"{_DISTRIBUTED}batched_embedding_kernel:BatchedFusedEmbedding": (
        "_config",
        "_feature_table_map",
        "emb_module",
        "fused_optimizer",
        "split_embedding_weights",
    ),
    f"{_DISTRIBUTED}batched_embedding_kernel:BatchedFusedEmbeddingBag": (
        "_config",
        "_feature_table_map",
        "emb_module",
        "fused_optimizer",
        "split_embedding_weights",
    ),
    f"{_DISTRIBUTED}comm_ops": ("get_gradient_division",),
    f"{_DISTRIBUTED}dist_data:KJTAllToAll": ("_pg", "_splits", "_stagger"),
    f"{_DISTRIBUTED}embedding": ("get_ec_index_dedup",),
    f"{_DISTRIBUTED}embedding:EmbeddingCollectionAwaitable": ("_awaitables_per_sharding",),
    f"{_DISTRIBUTED}embedding:EmbeddingCollectionContext": (
        "input_features",
        "reverse_indices",
        "seq_vbe_ctx",
        "sharding_contexts",
    ),
    f"{_DISTRIBUTED}embedding:ShardedEmbeddingCollection": (
        *_OF_COLLECTIONS,
        "_embedding_dim",
        "_embedding_dim_for_sharding_type",
        "_embedding_names_per_sharding",
        "_enabled_feature_score_auto_collection",
        "_inverse_indices_permute_per_sharding",
        "_need_indices",
        "_sharding_type_to_sharding",
        "_table_name_to_config",
    ),
    f"{_DISTRIBUTED}embedding_lookup:GroupedEmbeddingsLookup": (
        "_emb_modules",
        "optim_state_tracker_fn",
    ),
    f"{_DISTRIBUTED}embedding_lookup:GroupedPooledEmbeddingsLookup": (
        "_emb_modules",
        "optim_state_tracker_fn",
    ),
    f"{_DISTRIBUTED}embedding_sharding:KJTListSplitsAwaitable": ("awaitables",),
    f"{_DISTRIBUTED}composable.table_batched_embedding_slice:TableBatchedEmbeddingSlice": (
        "_original_tensor",
    ),
    f"{_DISTRIBUTED}embeddingbag": ("_apply_mean_pooling", "_create_mean_pooling_divisor"),
    f"{_DISTRIBUTED}embeddingbag:EmbeddingBagCollectionContext": ("divisor", "sharding_contexts"),
    f"{_DISTRIBUTED}embeddingbag:ShardedEmbeddingBagCollection": (
        *_OF_COLLECTIONS,
        "_embedding_bag_configs",
        "_embedding_dims",
        "_embedding_names",
        "_embedding_shardings",
        "_has_features_permute",
        "_has_mean_pooling_callback",
        "_init_mean_pooling_callback",
        "_initialize_torch_state",
        "_inverse_indices_permute_indices",
        "_kjt_key_indices",
        "_kt_key_ordering",
        "_optim",
        "_pooling_type_to_rs_features",
        "_table_name_to_config",
        "_table_names",
        "_uncombined_embedding_dims",
        "_uncombined_embedding_names",
        "create_embedding_bag_sharding",
        "reset_parameters",
        "sharding_type_to_sharding_infos",
        "update_shards",
    ),
    f"{_DISTRIBUTED}model_parallel:DistributedModelParallel": ("__init__", "module"),
    f"{_DISTRIBUTED}sharding.rw_sharding:RwPooledEmbeddingDist": ("_embedding_dims",),
    f"{_DISTRIBUTED}sharding.rw_sharding:RwSparseFeaturesDist": (
        "_dist",
        "unbucketize_permute_tensor",
    ),
    f"{_DISTRIBUTED}sharding.sequence_sharding:SequenceShardingContext": (
        "batch_size_per_rank",
        "features_before_input_dist",
        "input_splits",
        "output_splits",
        "unbucketize_permute_tensor",
    ),
    f"{_DISTRIBUTED}sharding.tw_sharding:BaseTwEmbeddingSharding": (
        "_grouped_embedding_configs_per_rank",
    ),
    f"{_DISTRIBUTED}sharding.tw_sharding:TwPooledEmbeddingDist": ("_dim_sum_per_rank",),
    f"{_DISTRIBUTED}sharding.tw_sharding:TwSparseFeaturesDist": ("_dist",),
    f"{_DISTRIBUTED}sharding.twrw_sharding:TwRwPooledEmbeddingDist": (
        "_cross_pg",
        "_dim_sum_per_node",
        "_intra_pg",
    ),
    f"{_DISTRIBUTED}sharding.twrw_sharding:TwRwSparseFeaturesDist": ("_dist",),
    f"{_DISTRIBUTED}train_pipeline.runtime_forwards:BaseForward": ("_args", "_module", "_name"),
    f"{_DISTRIBUTED}train_pipeline.utils": ("_rewrite_model",),
    f"{_DISTRIBUTED}types:LazyAwaitable": ("_wait_impl", "callbacks"),
    f"{_DISTRIBUTED}types:ShardingEnv2D": ("sharding_pg",),
    "torchrec.quant.embedding_modules": ("MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",),
    "torchrec.quant.embedding_modules:EmbeddingBagCollection": _OF_QUANTIZED,
    "torchrec.quant.embedding_modules:EmbeddingCollection": _OF_QUANTIZED,
    "torchrec.sparse.jagged_tensor:JaggedTensor": ("_lengths", "_offsets", "_values", "_weights"),
    "torchrec.tensor_types": ("UInt2Tensor", "UInt4Tensor"),
}


@cache
def check_torchrec() -> None:
    """Raises if the parts made for TorchRec can't work with the installed packages.

    Raises:
        VersionError: Packages are missing or don't fit, or lack names that are used here.
    """
    check_packages()
    missing = missing_names()
    if missing:
        report = examine_packages()
        raise VersionError(
            f"torchrec_bls uses {len(missing)} names that {report.found} lack: "
            f"{', '.join(missing)}. It is tested with {report.needed}.\n"
            f"Mend it with: {report.cure or 'pip install --upgrade torchrec-bls'}"
        )


def missing_names(contract: Mapping[str, Iterable[str]] = CONTRACT) -> list[str]:
    """Returns which names of the contract the installed packages lack, as "module:Class.name"."""
    missing = []
    for owner, names in contract.items():
        module_name, _, class_name = owner.partition(":")
        try:
            module = importlib.import_module(module_name)
            there = _names_of(getattr(module, class_name)) if class_name else set(dir(module))
        except (ImportError, AttributeError):
            missing.append(owner)
            continue
        missing += [f"{owner}.{name}" for name in names if name not in there]
    return missing


def _names_of(owner: type) -> set[str]:
    """Returns the attributes of a class, and those of its instances that its code or annotations
    name. An attribute that the class's own code sets or reads counts as present."""
    names = set(dir(owner))
    for base in owner.__mro__:
        # Not evaluated: annotations may use names that only type checkers have.
        names.update(vars(base).get("__annotations__", {}))
        names.update(vars(base).get("__dataclass_fields__", {}))
        for member in vars(base).values():
            function: Any = getattr(member, "fget", member)
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            names.update(code.co_names if code else ())
    return names


if __name__ == "__main__":
    print("\n".join(missing_names()))
