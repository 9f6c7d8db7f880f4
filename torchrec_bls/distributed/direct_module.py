"""The part of a sharded module that reads all ranks' tables itself."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_bls.direct.reads.direct_reads import (
    DirectReads,
    OutputForm,
    UnsentBatch,
    layouts_of,
    share,
)
from torchrec_bls.direct.shared_tables import agree_on_direct_reads, warn_of_exchange
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.exchanged_module import ExchangedModule
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.refused_batches import (
    RefusedBatchError,
    RefusedEmbeddings,
    take_part_in_the_rest,
)
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.sharder import NAME_THE_FUSED_KERNEL

_DENSE = EmbeddingComputeKernel.DENSE.value


class DirectModule(ExchangedModule):
    """Mix-in of the sharded modules: BLSConfig(lookup="direct")."""

    @property
    def rows_read(self) -> list[int]:
        """Returns how many rows of each rank's shards this rank has read; empty without direct
        reads."""
        return self._bls.direct.rows_read.tolist() if self._bls.direct is not None else []

    @property
    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although their process is gone."""
        return self._bls.direct.tables.owners_gone() if self._bls.direct is not None else []

    def agree_on_lookup(self) -> bool:
        """Returns whether the module reads directly. The ranks decide that in the first call.

        Raises:
            ValueError: lookup is "direct", and a rank can't read directly; all ranks raise.
            RendezvousError: a rank did not come, or could not share its tables.
        """
        if self._bls.reads_directly is None:
            with self.callers.agreeing:
                if self._bls.reads_directly is None:
                    self._bls.reads_directly = self._agree_on_lookup()
        return self._bls.reads_directly

    @outside_inference_mode
    def _agree_on_lookup(self) -> bool:
        state, exchanges = self._bls, self._bls.exchanges
        exchanges.deadline.training = torch.is_grad_enabled()
        state.meet()
        try:
            return self._share_tables()
        except ValueError:  # all ranks know why, and that there is nothing to repeat
            raise
        except BaseException:
            state.agreement.forget()
            raise

    def _share_tables(self) -> bool:
        state, exchanges = self._bls, self._bls.exchanges
        reason = agree_on_direct_reads(
            exchanges.group,
            exchanges.name,
            exchanges.deadline.seconds,
            self._why_not_direct(),
            exchanges.session,
        )
        if reason and exchanges.config.lookup == "direct":
            raise ValueError(f'{self._where}: lookup="direct" is not possible. {reason}')
        if reason:
            warn_of_exchange(exchanges.group, exchanges.name, reason)
            return False
        tables = self._tables()
        dtype = data_type_to_dtype(tables[0].data_type)
        layouts = layouts_of(tables, self._plan())
        live, shared, generation = share(exchanges, layouts, self._lookup_tables(), self, dtype)
        rank = exchanges.group.rank()
        form = self._output_form()
        state.direct = DirectReads(self._where, shared, generation, live, rank, tables, form)
        return True

    def _direct_input(self, ctx: Any, features: object) -> UnsentBatch:
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self._where}: autograd is on, but tables that are read directly do not change: "
                'use torch.no_grad(), or shard with lookup="exchange" to train'
            )
        self.calls.note()
        try:
            return UnsentBatch(self.check_input(features), ctx)
        except ValueError as error:
            ctx.bls_refusal = RefusedBatchError(str(error))
            return UnsentBatch(self.nothing(), ctx)

    @outside_inference_mode
    def _direct_output(self, ctx: Any, batch: CheckedBatch) -> LazyAwaitable[Any]:
        reads = self._bls.direct
        assert reads is not None
        embeddings = reads.output(batch)
        refusal = getattr(ctx, "bls_refusal", None)
        if refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, refusal, partial(take_part_in_the_rest, self))

    def _why_not_direct(self) -> str:
        """Returns why this rank can't read directly; empty if it can."""
        config = self._bls.exchanges.config
        module: Any = self  # TorchRec's attributes
        plan = self._plan()
        replicated = [name for name in plan if not exchanged([plan[name].sharding_type])]
        types = {table.data_type for table in self._tables()}
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
        if module._enabled_feature_score_auto_collection:
            return "scores of features are collected in the input dist, which direct reads pass by"
        if not all(self._is_plain(tables) for tables in self._lookup_tables()):
            return (
                "a lookup does more than reading its tables: it has a hook, a cache, weights of "
                "another type than its output, or an optimizer that counts forwards"
            )
        return ""

    def _plan(self) -> Any:
        module: Any = self
        return module.module_sharding_plan

    def _tables(self) -> list[Any]:
        return self._bls.tables

    @abstractmethod
    def _lookup_tables(self) -> Sequence[LookupTables]:
        """Returns the tables of this rank."""

    @abstractmethod
    def _is_plain(self, tables: LookupTables) -> bool:
        """Returns whether a lookup does nothing but read."""

    @abstractmethod
    def _output_form(self) -> OutputForm:
        """Returns the form of the output."""
