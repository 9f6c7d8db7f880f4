"""The dists of a quantized module whose rows travel as they are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_bls.direct.layout import Shard
from torchrec_bls.distributed.exchange_lookup import ExchangeLookup
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.exchanges.exchange import Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist, layout_of
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.quant.batches import NO_GRADIENTS, looked_up, needs_ids
from torchrec_bls.quant.local_rows import LocalRows
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.row_plan import RowPlan
from torchrec_bls.quant.stored_exchange import StoredExchange
from torchrec_bls.quant.stored_tables import RowSource

#: One exchange carries the rows of all tables, however they are planned.
STORED = "stored"
_NOTHING = torch.empty(0, dtype=torch.uint8)


class StoredDists:
    """Asks the ranks for the distinct rows of a batch, and looks the batch up in these rows.

    Rows come as FBGEMM stores them, without padding. FBGEMM's kernels look up the batch in them.

    Args:
        module: TorchRec's quantized module, whose lookups have no memory.
        state: state of the sharded module.
        plan: rows that batches ask for.
        rows: rows of this rank.
    """

    def __init__(self, module: Any, state: ModuleState, plan: RowPlan, rows: LocalRows) -> None:
        exchanges = state.exchanges
        group = exchanges.group
        self._module = module
        self._input_check = state.input_check
        self._needs_ids = needs_ids(module)
        self._plan = plan
        self._rows = rows
        self._ids_dist = BoundedLagIdsDist(
            group,
            plan.splits,
            1,
            exchanges.of(STORED, "ids"),
            exchanges.slot_growth(STORED),
            state.calls,
            False,
            None,
            plan.row_type,
        )
        self._exchange = StoredExchange(
            group.rank(),
            exchanges.of(STORED, "embeddings"),
            plan,
            plan.tables_of(group.rank(), rows),
        )

    def post(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """See Dists."""
        ctx.bls_asked = asked = self._plan.ask(batch)
        if self._needs_ids:
            ids = kept(batch.features)
            ctx.bls_ids_of_features = [ids[feature].values() for feature in self._plan.features]
        context = EmbeddingShardingContext()
        ctx.sharding_contexts.append(context)
        awaitable = self._ids_dist.post(asked.sent, [], asked.samples)
        awaitable.bind(context)
        return awaitable

    def look_up(self, ctx: Any, ids: ArrivedFeatures) -> LazyAwaitable[Any]:
        """See Dists."""
        layout = layout_of(ctx.sharding_contexts[0])
        return _StoredEmbeddings(self, self._exchange.post(ids, layout, ctx.bls_asked), ctx)

    def look_up_in(self, rows: torch.Tensor, ctx: Any) -> Any:
        """Returns the embeddings of a batch from its rows, as the unsharded module does.

        Args:
            rows: arrived rows, uint8.
            ctx: context of the batch.
        """
        module, asked = self._module, ctx.bls_asked
        for lookup, offsets in zip(module._emb_modules, asked.offsets, strict=True):
            lookup.weights_host, lookup.weights_offsets = rows, offsets
        try:
            embeddings = looked_up(module, asked.features, self._input_check)
        finally:
            for lookup in module._emb_modules:
                lookup.weights_host = _NOTHING  # the next batch reuses the memory
        if not self._needs_ids:
            return embeddings
        # As TorchRec does, each feature has its ids as the weights, not the numbers of rows.
        return {
            name: JaggedTensor(
                values=rows.values(),
                lengths=rows.lengths(),
                weights=ids.to(rows.weights().dtype),
            )
            for (name, rows), ids in zip(embeddings.items(), ctx.bls_ids_of_features, strict=True)
        }


class _StoredEmbeddings(ExchangeAwaitable[Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """The embeddings of a batch. They are looked up when its rows have arrived."""

    def __init__(self, dists: StoredDists, pending: Pending[torch.Tensor], ctx: Any) -> None:
        super().__init__()
        self._dists = dists
        self._pending = pending
        self._ctx = ctx

    def _wait_impl(self) -> Any:
        return self._dists.look_up_in(self._pending.wait(), self._ctx)


def exchange_lookup(
    state: ModuleState,
    module: Any,
    lookups: Lookups,
    shards: Mapping[str, Sequence[Shard]],
    source: RowSource,
) -> ExchangeLookup:
    """Puts this rank's rows of a module into its own memory. Waits for no other rank.

    Args:
        state: state of the sharded module.
        module: TorchRec's quantized module, whose own weights are freed.
        lookups: lookups of the module.
        shards: shards of each table, by its name.
        source: source of the rows.

    Raises:
        ValueError: the checkpoint lacks rows of this rank. The other ranks raise RendezvousError at
            their first batch.
    """
    group = state.exchanges.group
    try:
        rows = LocalRows(lookups, shards, source, group.rank())
    except BaseException as error:
        state.fail_all("sharding", error)
        raise
    lookups.take_over()
    dists = StoredDists(module, state, RowPlan(lookups, shards, group.size()), rows)
    return ExchangeLookup(state, dists, NO_GRADIENTS)
