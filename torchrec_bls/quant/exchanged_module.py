"""A quantized embedding module whose rows travel in their stored form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor
from torchrec.streamable import Multistreamable

from torchrec_bls.direct.layout import Shard
from torchrec_bls.direct.reads.direct_reads import layouts_of
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.exchanged_module import ExchangedModule
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.exchanges.exchange import Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.quant.batches import checked, is_weighted, looked_up, needs_ids
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.own_rows import OwnRows
from torchrec_bls.quant.row_plan import AskedBatch, RowPlan
from torchrec_bls.quant.stored_exchange import StoredExchange
from torchrec_bls.quant.stored_tables import row_source

# One exchange carries the rows of all tables, however they are planned.
_STORED = "stored"
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Context(Multistreamable):  # type: ignore[misc]
    """The context of one forward.

    Attributes:
        sharding_contexts: context of the only exchange; it gets the layout once the ids have
            arrived.
        asked: rows that the batch asks for.
        ids: ids of each feature, in the order of the lookups, if the output has them.
    """

    asked: AskedBatch
    ids: list[torch.Tensor]

    def __init__(self) -> None:
        self.sharding_contexts = [SimpleNamespace()]

    def record_stream(self, stream: object) -> None:
        """Does nothing, since nothing here is on a stream; see TorchRec."""


class ExchangedQuantCollection(ExchangedModule, ShardedModule[Any, Any, Any, Any]):  # type: ignore[misc]
    """TorchRec's quantized EmbeddingBagCollection or EmbeddingCollection over several processes.

    Each rank keeps its shards in its own memory. A batch asks the ranks for its distinct rows. They
    come as FBGEMM stores them, without padding. FBGEMM's kernels look up the batch in these rows.
    Results are those of the unsharded module, bit for bit. The state dict has this rank's rows of
    each table.

    Args:
        module: module to shard, for which `why_not` has no reason. It is taken over, and its own
            weights are freed.
        tables_name: name of its nn.ModuleDict that has the tables.
        params: plan of the module.
        group: group of ranks; one of them has each shard.
        config: configuration of the exchanges.
        name: name of the module.
        checkpoint: see BLSQuantEmbeddingBagCollectionSharder.
        prefix: prefix of the tables' names in the checkpoint.

    Raises:
        ValueError: the checkpoint lacks rows of this rank. The other ranks raise RendezvousError at
            their first batch.
    """

    #: Publishing and pipelines go by it.
    is_quantized: ClassVar[bool] = True

    def __init__(
        self,
        module: Any,
        tables_name: str,
        params: Mapping[str, ParameterSharding],
        group: dist.ProcessGroup,
        config: BLSConfig,
        name: str,
        checkpoint: Mapping[str, torch.Tensor] | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self._sharding_types = [_STORED]
        children: nn.ModuleDict = getattr(module, tables_name)
        lookups = Lookups(module, children, 1)
        configs = [each for tables in lookups.configs for each in tables]
        self._init_exchanges(
            replace(config, lookup="exchange"), group, name, configs, params, is_weighted(module)
        )
        source = row_source(
            module._emb_modules, lookups.begins, checkpoint, f"{prefix}{tables_name}"
        )
        shards: dict[str, Sequence[Shard]] = {
            table.name: table.shards for table in layouts_of(configs, params)
        }
        with self._all_or_none("sharding"):
            self._rows = OwnRows(lookups, shards, source, group.rank())
        lookups.take_over()
        # It is not registered: its content has the names of the unsharded module here.
        self._unsharded = (module,)
        self._needs_ids = needs_ids(module)
        self.add_module(tables_name, children)
        if module.register_tbes:
            self.tbes = module.tbes
        self._plan = RowPlan(lookups, shards, group.size())
        exchanges = self._bls.exchanges
        ids_dist = BoundedLagIdsDist(
            group,
            self._plan.splits,
            1,
            exchanges.of(_STORED, "ids"),
            exchanges.slot_growth(_STORED),
            lambda: self._bls.note,
            False,
            None,
            self._plan.row_type,
        )
        self._ids_dist = (ids_dist,)  # a tuple, so that it is not registered
        self._exchange = StoredExchange(
            group.rank(),
            exchanges.of(_STORED, "embeddings"),
            self._plan,
            self._plan.tables_of(group.rank(), self._rows),
        )

    @property
    def unsharded_module_type(self) -> type:
        """Returns the class of the unsharded module; see TorchRec."""
        return type(self._unsharded[0])

    def create_context(self) -> _Context:
        """Returns a new context; see TorchRec."""
        return _Context()

    def input_dist(self, ctx: _Context, features: object) -> Awaitable[Any]:
        """Posts the numbers of the rows that a batch needs.

        A batch that does not fit the module does not stop the others. The other ranks get their
        rows, and this rank raises ValueError where the embeddings are used.

        Raises:
            ValueError: a pipeline or another thread is calling the module. Nothing is posted.
        """
        self.callers.enter(self)
        try:
            batch = self.check_input(features)
        except ValueError as error:
            return self._post_nothing(ctx, error)
        return self.post_ids(ctx, batch)

    def compute(self, ctx: _Context, dist_input: ArrivedFeatures) -> Any:
        """Posts the rows that the ranks asked for. Returns the result of `output_dist`."""
        return self._post_embeddings(ctx, dist_input)

    def output_dist(self, ctx: _Context, output: Any) -> LazyAwaitable[Any]:
        """Returns `output`."""
        awaitable: LazyAwaitable[Any] = output
        return awaitable

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of all buffers: no other rank needs them sent."""
        for name, _ in self.named_buffers(prefix):
            yield name

    def _checked(self, features: object) -> CheckedBatch:
        if torch.is_grad_enabled():
            raise ValueError(
                "autograd is on, but quantized tables have no gradients: use torch.no_grad()"
            )
        return checked(self._bls.input_check, features)

    def _post_ids(self, ctx: _Context, batch: CheckedBatch) -> Awaitable[Any]:
        ctx.asked = self._plan.ask(batch)
        if self._needs_ids:
            ids = kept(batch.features)
            ctx.ids = [ids[feature].values() for feature in self._plan.features]
        (ids_dist,) = self._ids_dist
        awaitable = ids_dist.post(ctx.asked.sent, [], ctx.asked.samples)
        awaitable.bind(ctx.sharding_contexts[0])
        return awaitable

    def _look_up(self, ctx: _Context, input: ArrivedFeatures) -> LazyAwaitable[Any]:
        layout = self.layout_of(ctx)
        assert layout is not None, "ids are waited for before they are looked up"
        return _StoredEmbeddings(self, self._exchange.post(input, layout, ctx.asked), ctx)

    def look_up_in(self, rows: torch.Tensor, ctx: _Context) -> Any:
        """Returns the embeddings of a batch from its rows, as the unsharded module does.

        Args:
            rows: arrived rows, uint8.
            ctx: context of the batch.
        """
        module = self._unsharded[0]
        for lookup, offsets in zip(module._emb_modules, ctx.asked.offsets, strict=True):
            lookup.weights_host, lookup.weights_offsets = rows, offsets
        try:
            embeddings = looked_up(module, ctx.asked.features, self._bls.input_check)
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
            for (name, rows), ids in zip(embeddings.items(), ctx.ids, strict=True)
        }


class _StoredEmbeddings(ExchangeAwaitable[Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """The embeddings of a batch. They are looked up when its rows have arrived."""

    def __init__(
        self, module: ExchangedQuantCollection, pending: Pending[torch.Tensor], ctx: _Context
    ) -> None:
        super().__init__()
        self._module = module
        self._pending = pending
        self._ctx = ctx

    def _wait_impl(self) -> Any:
        return self._module.look_up_in(self._pending.wait(), self._ctx)
