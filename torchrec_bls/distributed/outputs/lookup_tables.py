"""Tables of a lookup, to read their rows where they lie.

Without gradients an unpooled lookup only copies rows, and a pooled one only sums them. If the
lookup does nothing else, the exchange can do it, from the tables straight into the slots.
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
from torchrec.distributed.types import ShardMetadata

from torchrec_bls import _native
from torchrec_bls.distributed.data_parallel import is_replicated

#: How a plan gets the kernel that rows can be read from.
NAME_THE_FUSED_KERNEL = (
    'name it in the plan, since TorchRec\'s generators take "dense" on the CPU: '
    'table_wise(rank=0, compute_kernel="fused") of sharding_plan, '
    'ParameterConstraints(compute_kernels=["fused"]), or '
    'plan[table].compute_kernel = "fused" where a generator has no such argument'
)

# Optimizers whose state in FBGEMM does not count forwards.
_STATELESS_FORWARD = {
    EmbOptimType.NONE,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_POOLINGS = (PoolingMode.SUM, PoolingMode.MEAN)


class LookupTables:
    """The tables of one of TorchRec's lookups. They tell whether the lookup does more than read
    them.

    Every forward asks `copies_rows` or `sums_rows` first. These look again at what may change
    between forwards: hooks, and the memory of the tables with its dtype.

    Args:
        lookup: lookup of TorchRec, or its DistributedDataParallel for data-parallel tables.
    """

    def __init__(self, lookup: Any) -> None:
        replicas: Any = lookup.module if is_replicated(lookup) else lookup
        self._lookup = replicas
        self._kernels: list[Any] = list(replicas._emb_modules)
        self._fbgemm: list[Any] = [kernel.emb_module for kernel in self._kernels]
        # Modules keep their dictionaries of hooks, so that looking for any hook is quick.
        self._hooks = [
            hooks
            for module in (replicas, *self._kernels, *self._fbgemm)
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._only_copies = type(replicas) is GroupedEmbeddingsLookup and self._are_plain(
            BatchedFusedEmbedding
        )
        self._only_sums = (
            type(replicas) is GroupedPooledEmbeddingsLookup
            and self._are_plain(BatchedFusedEmbeddingBag)
            and all(fbgemm.pooling_mode in _POOLINGS for fbgemm in self._fbgemm)
        )
        self._memory: list[int] | None = None
        self._dtypes: set[torch.dtype] = set()
        self._by_feature: _native.Tables | None = None

    def _are_plain(self, kernel_type: type[nn.Module]) -> bool:
        return all(type(kernel) is kernel_type for kernel in self._kernels) and all(
            type(fbgemm) is SplitTableBatchedEmbeddingBagsCodegen
            and fbgemm.use_cpu
            and fbgemm.weights_precision.as_int() == fbgemm.output_dtype
            and fbgemm.optimizer in _STATELESS_FORWARD
            for fbgemm in self._fbgemm
        )

    def copies_rows(self) -> bool:
        """Returns whether the lookup only copies rows of tables in host memory, all of one type."""
        if not self._only_copies or self._is_watched():
            return False
        self._find_memory()
        return len(self._dtypes) <= 1

    def sums_rows(self) -> bool:
        """Returns whether the lookup only pools float32 rows in host memory, to sums or to means.

        FBGEMM's kernels add the rows of a bag in the order of its ids, as the exchange does.
        """
        if not self._only_sums or self._is_watched():
            return False
        self._find_memory()
        return self._dtypes <= {torch.float32}

    def has_hooks(self) -> bool:
        """Returns whether a hook may change what is looked up."""
        return any(self._hooks)

    def storages(self) -> list[torch.Tensor]:
        """Returns the memory of the tables: the whole memory of each of FBGEMM's kernels."""
        return [fbgemm.weights_host for fbgemm in self._fbgemm]

    def shards(self) -> list[tuple[str, ShardMetadata, torch.Tensor]]:
        """Returns name, place in the table and weights of each shard of this rank."""
        return [
            (table.name, table.local_metadata, weights)
            for kernel in self._kernels
            for table, weights in zip(
                kernel._config.embedding_tables, kernel.split_embedding_weights(), strict=True
            )
        ]

    def _is_watched(self) -> bool:
        return self._lookup.optim_state_tracker_fn is not None or self.has_hooks()

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of copied rows; float32, as in TorchRec, if this rank has no tables."""
        return next(iter(self._dtypes), torch.float32)

    @property
    def by_feature(self) -> _native.Tables:
        """Returns the table of each feature, as native code reads it. It keeps the tables' memory
        until a forward finds them in another one, and is made at its first use: tables that
        move to shared memory would stay twice."""
        if self._by_feature is None:
            self._by_feature = _native.Tables(
                [
                    (table, fbgemm.pooling_mode == PoolingMode.MEAN)
                    for kernel, fbgemm in zip(self._kernels, self._fbgemm, strict=True)
                    for tables in (kernel.split_embedding_weights(),)
                    for table in (tables[i] for i in kernel._feature_table_map)
                ]
            )
        return self._by_feature

    def _find_memory(self) -> None:
        memory = [fbgemm.weights_host.data_ptr() for fbgemm in self._fbgemm]
        if memory == self._memory:
            return
        self._dtypes = {fbgemm.weights_host.dtype for fbgemm in self._fbgemm}
        self._by_feature = None
        self._memory = memory
