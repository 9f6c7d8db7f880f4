"""Tables of a sequence lookup, for reading rows where they lie.

Without gradients an unpooled lookup is a copy of rows. The exchange can make it, from the tables
straight into the slots, if nothing else belongs to the lookup.
"""

from collections.abc import Iterable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup

# Those for which FBGEMM does not count forwards in the state of the optimizer.
_STATELESS_FORWARD = {
    EmbOptimType.NONE,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class SequenceTables:
    """The tables of one of TorchRec's sequence lookups.

    Args:
        lookup: `can_read` says yes to it.
    """

    def __init__(self, lookup: GroupedEmbeddingsLookup) -> None:
        self._kernels = list(lookup._emb_modules)
        self._memory: list[int] | None = None
        self._by_feature: list[tuple[int, int]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of rows; float32, as in TorchRec, where this rank has no tables."""
        if not self._kernels:
            return torch.float32
        dtype: torch.dtype = self._kernels[0].emb_module.weights_host.dtype
        return dtype

    def by_feature(self) -> list[tuple[int, int]]:
        """Returns address and number of rows of the table of each feature."""
        memory = [kernel.emb_module.weights_host.data_ptr() for kernel in self._kernels]
        if memory != self._memory:
            self._by_feature = [
                (weights[table].data_ptr(), weights[table].shape[0])
                for kernel in self._kernels
                for weights in (kernel.split_embedding_weights(),)
                for table in kernel._feature_table_map
            ]
            self._memory = memory
        return self._by_feature


def can_read(lookup: Any) -> bool:
    """Whether a lookup only copies rows of tables in host memory."""
    return (
        type(lookup) is GroupedEmbeddingsLookup
        and lookup.optim_state_tracker_fn is None
        and not _hooks(lookup)
        and all(_only_copies(kernel) for kernel in lookup._emb_modules)
        and len({kernel.emb_module.weights_host.dtype for kernel in lookup._emb_modules}) <= 1
    )


def _only_copies(kernel: Any) -> bool:
    if type(kernel) is not BatchedFusedEmbedding:
        return False
    fbgemm = kernel.emb_module
    return (
        type(fbgemm) is SplitTableBatchedEmbeddingBagsCodegen
        and fbgemm.use_cpu
        and fbgemm.weights_precision.as_int() == fbgemm.output_dtype
        and fbgemm.optimizer in _STATELESS_FORWARD
        and not _hooks(kernel)
        and not _hooks(fbgemm)
    )


def _hooks(module: torch.nn.Module) -> Iterable[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
