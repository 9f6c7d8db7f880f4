"""TorchRec's quantized modules, with their weights in other memory."""

import copy
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
    unpadded_row_size_in_bytes,
)
from torch import nn
from torchrec.quant.embedding_modules import MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS

from torchrec_bls.direct.pieces import page_bytes
from torchrec_bls.huge_pages import HugePages, huge_pages_for
from torchrec_bls.quant.stored_tables import PACKED, StoredTable

# Child of a module in which its lookups are registered, if they are.
_REGISTERED = "tbes"


class Lookups:
    """The lookups of a quantized EmbeddingBagCollection or EmbeddingCollection.

    Args:
        module: TorchRec's module, with weights on the CPU or the meta device. `move_to` and
            `take_over` change it.
        children: nn.ModuleDict in it that has the tables, by name.
        huge_pages: see BLSConfig. The weights of each lookup begin on a page.

    Attributes:
        huge_pages: what the segments of the tables ask for.
        configs: configs of the tables of each lookup.
        made: new lookups that replace the module's; they have no memory for weights.
        begins: first byte of each lookup's weights in the memory of all tables.
        by_lookup: tables of each lookup, in the order of their memory.
        tables: tables of all lookups, in the order of their memory.
    """

    def __init__(self, module: Any, children: nn.ModuleDict, huge_pages: HugePages | None) -> None:
        self._module = module
        self._children = children
        self.configs = [list(tables) for tables in module._key_to_tables.values()]
        self.made = [_on_cpu(lookup) for lookup in module._emb_modules]
        stored = sum(lookup.host_size for lookup in self.made)
        self.huge_pages = huge_pages_for(huge_pages, stored)
        page = page_bytes(self.huge_pages)
        sizes = [-(-lookup.host_size // page) * page for lookup in self.made]
        self.begins = [0, *itertools.accumulate(sizes)][:-1]
        self.by_lookup = [
            [
                _stored_table(config, lookup, spec, begin + offset)
                for config, spec, offset in zip(
                    configs, lookup.embedding_specs, lookup.weights_physical_offsets, strict=True
                )
            ]
            for configs, lookup, begin in zip(self.configs, self.made, self.begins, strict=True)
        ]
        self.tables = [table for tables in self.by_lookup for table in tables]

    def move_to(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Makes the module look up in `memory`, and frees its own weights.

        Returns:
            The tensors through which the weights may be written to.
        """
        views: list[torch.Tensor] = []
        self.take_over()
        for configs, lookup, begin in zip(self.configs, self.made, self.begins, strict=True):
            lookup.weights_host = memory[begin : begin + lookup.host_size]
            views += [lookup.weights_host, *self.show(configs, lookup)]
        return views

    def bound_to(self, memory: torch.Tensor) -> Any:
        """Returns a module that looks up in `memory`, and shows none of it. This one stays as it
        is, so that a thread which is in a lookup goes on in the memory that it began with."""
        return self.done_by(
            [
                _shallow_copy(lookup, weights_host=memory[begin : begin + lookup.host_size])
                for lookup, begin in zip(self.made, self.begins, strict=True)
            ]
        )

    def done_by(self, lookups: Sequence[Any]) -> Any:
        """Returns a module that calls other lookups in the places of its own; see `bound_to`."""
        module = _shallow_copy(self._module)
        module._emb_modules = list(lookups)
        module._device = torch.device("cpu")
        module._table_name_to_quantized_weights = None
        for name, child in self._module.named_children():
            if child is self._children or name == _REGISTERED:
                del module._modules[name]
        return module

    def take_over(self) -> None:
        """Gives the module the new lookups, and frees its own weights."""
        module = self._module
        module._emb_modules = self.made
        if module.register_tbes:
            module.tbes = nn.ModuleList(self.made)
        module._table_name_to_quantized_weights = None
        module._device = torch.device("cpu")

    def hide(self, table: str) -> None:
        """Leaves a table out of the state dict."""
        child = self._children[table]
        for name, _ in list(child.named_buffers()):
            setattr(child, name, None)

    def show(self, configs: Sequence[Any], lookup: Any) -> list[torch.Tensor]:
        """Makes the buffers of the state dict, as the module's constructor does.

        Args:
            configs: configs of tables.
            lookup: lookup that has these tables, with its weights.
        """
        split = bool(getattr(self._module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS))
        parts = lookup.split_embedding_weights_with_scale_bias(2 if split else 0)
        shown: list[torch.Tensor] = []
        for config, (weight, scale, bias) in zip(configs, parts, strict=True):
            child: Any = self._children[config.name]
            child.weight = PACKED.get(config.data_type, _as_it_is)(weight)
            if split:
                child.weight_qscale, child.weight_qbias = scale, bias
            shown += [each for each in child.buffers() if each is not None]
        return shown


def lookup_of(specs: Sequence[Any], like: Any) -> Any:
    """Returns a lookup in its own memory, which is zero.

    Args:
        specs: FBGEMM's specifications of its tables.
        like: a lookup, for the layout of rows.
    """
    made = IntNBitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(*spec[:4], EmbeddingLocation.HOST) for spec in specs],
        device=torch.device("cpu"),
        bounds_check_mode=BoundsCheckMode.NONE,
        row_alignment=like.row_alignment,
    )
    made.weights_host = torch.zeros(made.host_size, dtype=torch.uint8)
    made.weight_initialized = True
    return made


def _stored_table(config: Any, lookup: Any, spec: Any, begin: int) -> StoredTable:
    _, rows, columns, weights_type, _ = spec
    scale = lookup.scale_bias_size_in_bytes
    return StoredTable(
        config.name,
        rows,
        columns,
        config.data_type,
        rounded_row_size_in_bytes(columns, weights_type, lookup.row_alignment, scale),
        unpadded_row_size_in_bytes(columns, weights_type, scale),
        begin,
    )


def _on_cpu(lookup: Any) -> Any:
    """Returns a lookup of the same tables, with no memory for weights and no check of ids."""
    made = IntNBitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            (*spec[:4], EmbeddingLocation.HOST)  # modules on the meta device have another location
            for spec in lookup.embedding_specs
        ],
        feature_table_map=lookup.feature_table_map,
        pooling_mode=PoolingMode(lookup.pooling_mode),
        device=torch.device("cpu"),
        bounds_check_mode=BoundsCheckMode.NONE,
        output_dtype=SparseType.from_int(lookup.output_dtype),
        row_alignment=lookup.row_alignment,
    )
    made.weight_initialized = True
    made.initialize_logical_weights_placements_and_offsets()
    return made


def _shallow_copy(module: Any, **changed: Any) -> Any:
    """Returns a module of the same parts, of which others may be put into either."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        made.__dict__[name] = copy.copy(made.__dict__[name])
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight
