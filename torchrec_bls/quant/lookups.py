"""TorchRec's quantized modules, with their weights in other memory."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
    rounded_row_size_in_bytes,
)
from torch import nn
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS
from torchrec.tensor_types import UInt2Tensor, UInt4Tensor

from torchrec_bls.quant.stored_tables import StoredTable, is_supported

_PACKED = {DataType.INT4: UInt4Tensor, DataType.INT2: UInt2Tensor}


class Lookups:
    """The lookups of a quantized EmbeddingBagCollection or EmbeddingCollection.

    Args:
        module: TorchRec's, with weights on the CPU or the meta device. `move_to` changes it.
        children: nn.ModuleDict in it that has the tables, by name.
        page: bytes of a page, at which the weights of each lookup begin.

    Attributes:
        begins: where each lookup's weights begin in the memory of all tables, bytes.
        tables: tables in the order of their memory.
    """

    def __init__(self, module: Any, children: nn.ModuleDict, page: int) -> None:
        self._module = module
        self._children = children
        self.configs = [list(tables) for tables in module._key_to_tables.values()]
        self.made = [_on_cpu(lookup) for lookup in module._emb_modules]
        sizes = [-(-lookup.host_size // page) * page for lookup in self.made]
        self.begins = [0, *itertools.accumulate(sizes)][:-1]
        self.tables = [
            StoredTable(
                config.name,
                rows,
                columns,
                config.data_type,
                rounded_row_size_in_bytes(
                    columns, weights_type, lookup.row_alignment, lookup.scale_bias_size_in_bytes
                ),
                begin + offset,
            )
            for configs, lookup, begin in zip(self.configs, self.made, self.begins, strict=True)
            for config, (_, rows, columns, weights_type, _), offset in zip(
                configs, lookup.embedding_specs, lookup.weights_physical_offsets, strict=True
            )
        ]

    def move_to(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Has the module look up in `memory`, and frees its own weights.

        Returns:
            The tensors through which the weights may be written to.
        """
        views: list[torch.Tensor] = [memory]
        for configs, lookup, begin in zip(self.configs, self.made, self.begins, strict=True):
            lookup.weights_host = memory[begin : begin + lookup.host_size]
            lookup.weight_initialized = True
            lookup.initialize_logical_weights_placements_and_offsets()
            views += self._show(configs, lookup)
        module = self._module
        module._emb_modules = self.made
        if module.register_tbes:
            module.tbes = nn.ModuleList(self.made)
        module._table_name_to_quantized_weights = None
        module._device = torch.device("cpu")
        return views

    def _show(self, configs: Sequence[Any], lookup: Any) -> list[torch.Tensor]:
        """Makes the buffers of the state dict, as the module's constructor does."""
        split = bool(getattr(self._module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS))
        parts = lookup.split_embedding_weights_with_scale_bias(2 if split else 0)
        shown: list[torch.Tensor] = []
        for config, (weight, scale, bias) in zip(configs, parts, strict=True):
            child: Any = self._children[config.name]
            child.weight = _PACKED.get(config.data_type, _as_it_is)(weight)
            if split:
                child.weight_qscale, child.weight_qbias = scale, bias
            shown += [each for each in child.buffers() if each is not None]
        return shown


def why_not(module: Any) -> str:
    """Returns why a module's weights can't be shared; empty if they can."""
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


def _on_cpu(lookup: Any) -> Any:
    """Returns a lookup of the same tables, with no memory for weights and no check of ids."""
    return IntNBitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            (*spec[:4], EmbeddingLocation.HOST)  # modules on the meta device have another one
            for spec in lookup.embedding_specs
        ],
        feature_table_map=lookup.feature_table_map,
        pooling_mode=PoolingMode(lookup.pooling_mode),
        device=torch.device("cpu"),
        bounds_check_mode=BoundsCheckMode.NONE,
        output_dtype=SparseType.from_int(lookup.output_dtype),
        row_alignment=lookup.row_alignment,
    )


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight
