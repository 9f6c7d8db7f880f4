"""How the ranks of a module come to read each other's tables, in its first forward."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_bls.direct.float_tables import OwnTables, share_tables
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.strips import WORD_BYTES
from torchrec_bls.direct.layout import Shard, TableLayout, layouts_of
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.obstacles import agree_on_direct_reads, warn_of_exchange
from torchrec_bls.direct.reads.float_reads import FloatReads, OutputForm
from torchrec_bls.direct.sharing import NotRegisteredError
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.outputs.lookup_tables import NAME_THE_FUSED_KERNEL, LookupTables

_DENSE = EmbeddingComputeKernel.DENSE.value


class ShardedTables(Protocol):
    """A module that TorchRec has sharded, with the tables that its ranks may share.

    Attributes:
        module: TorchRec's sharded module.
    """

    module: Any

    @property
    def tables(self) -> list[Any]:
        """Returns EmbeddingConfig or EmbeddingBagConfig of each table."""

    @property
    def lookup_tables(self) -> Sequence[LookupTables]:
        """Returns the tables of this rank."""

    @property
    def only_read(self) -> bool:
        """Returns whether the lookups of this rank do nothing but read."""

    def output_form(self) -> OutputForm:
        """Returns the form of the module's output."""


def agree_on_reads(
    where: str, exchanges: Any, sharded: ShardedTables, gpu: Gpu | None
) -> FloatReads | None:
    """Returns the direct reads of a module, collectively; None if its ranks have to exchange.

    Args:
        where: name of the module and its rank.
        exchanges: ModuleExchanges of the module, with its configuration.
        sharded: the module.
        gpu: see SharedTables.

    Raises:
        ValueError: lookup is "direct", and a rank can't read directly; all ranks raise.
        RendezvousError: a rank did not come, or could not share its tables, or register them with
            its GPU.
    """
    reason = agree_on_direct_reads(
        exchanges.group,
        exchanges.name,
        exchanges.deadline.seconds,
        _why_not(exchanges.config, sharded, gpu),
        exchanges.session,
    )
    if reason and exchanges.config.lookup == "direct":
        raise ValueError(f'{where}: lookup="direct" is not possible. {reason}')
    if reason:
        warn_of_exchange(exchanges.group, exchanges.name, reason)
        return None
    module, tables, lookup_tables = sharded.module, sharded.tables, sharded.lookup_tables
    live = LiveWeights(
        [storage for each in lookup_tables for storage in each.storages()],
        _tensors_of(module),
    )
    shards = {
        (name, Shard.of(metadata)): weights
        for each in lookup_tables
        for name, metadata, weights in each.shards()
    }
    try:
        shared, generation = share_tables(
            exchanges.group,
            exchanges.name,
            exchanges.deadline.seconds,
            layouts_of(tables, module.module_sharding_plan),
            OwnTables(live, shards),
            data_type_to_dtype(tables[0].data_type),
            exchanges.config.huge_pages,
            exchanges.session,
            gpu,
        )
    except NotRegisteredError as error:
        if exchanges.config.lookup == "direct":
            raise
        warn_of_exchange(exchanges.group, exchanges.name, str(error))
        return None
    rank = exchanges.group.rank()
    return FloatReads(where, shared, generation, live, rank, tables, sharded.output_form())


def _why_not(config: Any, sharded: ShardedTables, gpu: Gpu | None) -> str:
    """Returns why this rank can't read directly; empty if it can."""
    module = sharded.module
    plan = module.module_sharding_plan
    replicated = [name for name in plan if not exchanged([plan[name].sharding_type])]
    types = {table.data_type for table in sharded.tables}
    if torch.is_grad_enabled():
        return (
            "autograd is on, and tables that are read directly do not change: use "
            'torch.no_grad(), or lookup="exchange" to train'
        )
    if config.codecs is not None:
        return "codecs encode embeddings on their way, and direct reads send none"
    if replicated:
        return f"tables {replicated} are planned data_parallel: plan them table_wise"
    dense = [name for name in plan if plan[name].compute_kernel == _DENSE]
    if dense:
        return (
            f"tables {dense} are planned with compute kernel dense, and only tables of the "
            f"fused kernel can be shared: {NAME_THE_FUSED_KERNEL}"
        )
    if len(types) > 1:
        return f"tables are of several types, {sorted(each.name for each in types)}"
    if module.post_lookup_tracker_fn is not None or module.post_odist_tracker_fn is not None:
        return "a tracker follows the lookups, which direct reads pass by"
    # TorchRec 1.6 has no such scores of pooled features.
    if getattr(module, "_enabled_feature_score_auto_collection", False):
        return "scores of features are collected in the input dist, which direct reads pass by"
    if not sharded.only_read:
        return (
            "a lookup does more than reading its tables: it has a hook, a cache, weights of "
            "another type than its output, or an optimizer that counts forwards"
        )
    if gpu is not None:
        dtype = data_type_to_dtype(sharded.tables[0].data_type)
        return not_of_words(layouts_of(sharded.tables, plan), dtype)
    return ""


def not_of_words(tables: Iterable[TableLayout], dtype: torch.dtype) -> str:
    """Returns which table of a dtype a GPU can't read, since its rows are of no whole words; empty
    if it can read all."""
    for table in tables:
        columns = {shard.columns for shard in table.shards}
        if any(each * dtype.itemsize % WORD_BYTES for each in columns):
            return (
                f"table '{table.name}' has shards of {sorted(columns)} columns of {table.dtype}, "
                f"and GPUs read whole words of {WORD_BYTES} bytes: give it an even number of them"
            )
    return ""


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor through which the weights of a sharded module may be reached."""
    for parameter in module.parameters():
        yield parameter
        # Covers all tables of a kernel; a parameter shows one table. TorchRec copies modules by it.
        whole = getattr(parameter, "_original_tensor", None)
        if whole is not None:
            yield whole
    for lookup in module._lookups:
        yield from lookup.parameters()
        for kernel in lookup._emb_modules:
            for parameter in kernel.fused_optimizer.params.values():
                yield from _local(parameter)
    for tensor in module.state_dict().values():
        yield from _local(tensor)


def _local(tensor: Any) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            yield shard.tensor
    else:
        yield tensor
