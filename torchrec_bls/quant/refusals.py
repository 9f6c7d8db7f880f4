"""The reasons why a quantized module can't be sharded over processes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.types import ParameterSharding

from torchrec_bls.direct.layout import layouts_of
from torchrec_bls.quant.stored_tables import is_supported


def why_not(
    module: Any,
    params: Mapping[str, ParameterSharding],
    checkpoint: Mapping[str, torch.Tensor] | None,
) -> str:
    """Returns why a quantized module can't be sharded by a plan; empty if it can.

    Args:
        module: TorchRec's module.
        params: plan of the module.
        checkpoint: checkpoint that its weights come from; None: the module has them.
    """
    configs = [each for tables in module._key_to_tables.values() for each in tables]
    return (
        _why_not_planned(configs, params)
        or why_not_read(module)
        or _why_no_weights(module, checkpoint)
    )


def why_not_read(module: Any) -> str:
    """Returns why no lookup of a quantized module can read rows as they are stored; empty if all
    can."""
    for lookup in module._emb_modules:
        if type(lookup) is not IntNBitTableBatchedEmbeddingBagsCodegen:
            return f"a lookup is a {type(lookup).__name__}, whose rows are not in one piece"
        if lookup.index_remappings_array.numel() or lookup.index_remapping_hash_table.numel():
            return "tables are pruned, and ids remapped: shard tables that are not pruned"
    for config in itertools.chain(*module._key_to_tables.values()):
        if getattr(config, "num_embeddings_post_pruning", None) is not None:
            return f"table '{config.name}' is pruned: shard tables that are not pruned"
        if not is_supported(config.data_type):
            return (
                f"table '{config.name}' is of type {config.data_type.name}: quantize it to INT8, "
                "INT4, INT2, FP16 or FP32"
            )
    return ""


def _why_not_planned(configs: Sequence[Any], params: Mapping[str, ParameterSharding]) -> str:
    missing = [config.name for config in configs if config.name not in params]
    if missing:
        return f"tables {missing} are not in the plan"
    for table in layouts_of(configs, params):
        # A plan's columns are those of the state dict, in bytes or packed numbers, or those of the
        # float module. So a shard counts as whole rows if it begins at the first column.
        if any(shard.first_column for shard in table.shards):
            return (
                f"table '{table.name}' is planned in columns, but a stored row has one scale and "
                "shift for all of them: plan it table_wise or row_wise"
            )
        if not table.has_each_row_once():
            return f"the shards of table '{table.name}' in the plan are not its {table.rows} rows"
    return ""


def _why_no_weights(module: Any, checkpoint: Mapping[str, torch.Tensor] | None) -> str:
    if checkpoint is None and any(lookup.weights_host.is_meta for lookup in module._emb_modules):
        return (
            "the module is on the meta device and has no weights: give the sharder the checkpoint "
            "of the float model"
        )
    return ""
