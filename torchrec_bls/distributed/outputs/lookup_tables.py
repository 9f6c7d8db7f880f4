"""Tables of a lookup, for reading rows where they lie.

Without gradients an unpooled lookup is a copy of rows, and a pooled one sums of rows. The exchange
can make them, from the tables straight into the slots, if nothing else belongs to the lookup.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)

from torchrec_bls.distributed.data_parallel import is_replicated

# Those for which FBGEMM does not count forwards in the state of the optimizer.
_STATELESS_FORWARD = {
    EmbOptimType.NONE,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class LookupTables:
    """The tables of one of TorchRec's lookups.

    Args:
        lookup: `copies_rows` or `sums_rows` says yes to it, or nobody asks for its tables.
    """

    def __init__(self, lookup: Any) -> None:
        replicas: Any = lookup.module if is_replicated(lookup) else lookup
        self._kernels: list[Any] = list(replicas._emb_modules)
        self._memory: list[int] | None = None
        self._by_feature: list[tuple[int, int, int, bool]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of rows; float32, as in TorchRec, where this rank has no tables."""
        if not self._kernels:
            return torch.float32
        dtype: torch.dtype = self._kernels[0].emb_module.weights_host.dtype
        return dtype

    def by_feature(self) -> list[tuple[int, int, int, bool]]:
        """Returns the table of each feature: address, number of rows, bytes of a row, and whether
        its bags are pooled to means."""
        memory = [kernel.emb_module.weights_host.data_ptr() for kernel in self._kernels]
        if memory != self._memory:
            self._by_feature = [
                (
                    table.data_ptr(),
                    table.shape[0],
                    table.shape[1] * table.element_size(),
                    kernel.emb_module.pooling_mode == PoolingMode.MEAN,
                )
                for kernel in self._kernels
                for tables in (kernel.split_embedding_weights(),)
                for table in (tables[i] for i in kernel._feature_table_map)
            ]
            self._memory = memory
        return self._by_feature


def copies_rows(lookup: Any) -> bool:
    """Whether a lookup only copies rows of tables in host memory, all of one type."""
    return (
        type(lookup) is GroupedEmbeddingsLookup
        and _only_reads(lookup, BatchedFusedEmbedding)
        and len({kernel.emb_module.weights_host.dtype for kernel in lookup._emb_modules}) <= 1
    )


def sums_rows(lookup: Any) -> bool:
    """Whether a lookup only pools float32 rows of tables in host memory, to sums or to means.

    FBGEMM's kernels add the rows of a bag in the order of its ids, as the exchange does.
    """
    return (
        type(lookup) is GroupedPooledEmbeddingsLookup
        and _only_reads(lookup, BatchedFusedEmbeddingBag)
        and all(
            kernel.emb_module.pooling_mode in (PoolingMode.SUM, PoolingMode.MEAN)
            and kernel.emb_module.weights_host.dtype == torch.float32
            for kernel in lookup._emb_modules
        )
    )


def _only_reads(lookup: Any, kernel_type: type[nn.Module]) -> bool:
    kernels: list[Any] = list(lookup._emb_modules)
    return (
        lookup.optim_state_tracker_fn is None
        and not _has_hooks(lookup)
        and all(
            type(kernel) is kernel_type
            and not _has_hooks(kernel)
            and _reads_host_memory(kernel.emb_module)
            for kernel in kernels
        )
    )


def _reads_host_memory(fbgemm: Any) -> bool:
    return (
        type(fbgemm) is SplitTableBatchedEmbeddingBagsCodegen
        and not _has_hooks(fbgemm)
        and fbgemm.use_cpu
        and fbgemm.weights_precision.as_int() == fbgemm.output_dtype
        and fbgemm.optimizer in _STATELESS_FORWARD
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)
