"""A quantized embedding module whose tables are in several processes' memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import LazyAwaitable, ParameterSharding, ShardedModule
from torchrec.streamable import Multistreamable

from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.reads.direct_reads import DirectEmbeddings, UnsentBatch, layouts_of
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.inputs.refused_batches import (
    Calls,
    RefusedEmbeddings,
    take_part_in_the_rest,
)
from torchrec_bls.quant.batches import checked, is_weighted, looked_up
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.shared_rows import HUGE_PAGE, SMALL_PAGE, SharedRows
from torchrec_bls.quant.stored_tables import row_source


@dataclass
class _Context(Multistreamable):  # type: ignore[misc]
    """The context of one forward: why this rank can't look its batch up, if it can't."""

    refusal: ValueError | None = None

    def record_stream(self, stream: object) -> None:
        """Does nothing, since nothing here is on a stream; see TorchRec."""


class ShardedQuantCollection(ShardedModule[Any, Any, Any, Any]):  # type: ignore[misc]
    """TorchRec's quantized EmbeddingBagCollection or EmbeddingCollection over several processes.

    Each rank keeps its shards in shared memory, as FBGEMM stores them. It looks up its own batch in
    the shards of all ranks with FBGEMM's kernels. So results are those of the unsharded module, bit
    for bit. Only this constructor is collective: afterwards no rank waits for another one. The
    state dict is that of the unsharded module, on every rank.

    Args:
        module: module to shard, for which `why_not` has no reason. It is taken over, and its own
            weights are freed.
        tables_name: name of its nn.ModuleDict that has the tables.
        params: plan of the module.
        group: group of ranks on one host; one of them has each shard.
        config: configuration of bad ids, deadline and pages.
        name: name of the module.
        checkpoint: see BLSQuantEmbeddingBagCollectionSharder.
        prefix: prefix of the tables' names in the checkpoint.

    Raises:
        ValueError: the checkpoint lacks rows of this rank.
        RendezvousError: a rank did not come, has no memory for its shards, or has other weights.
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
        self.calls = Calls()
        self.reads_directly = True
        self._where = f"{name} on {rank_name(group)}"
        deadline = timeout_of(group) if config.deadline is None else config.deadline
        children: nn.ModuleDict = getattr(module, tables_name)
        configs = [each for tables in module._key_to_tables.values() for each in tables]
        made = Lookups(module, children, HUGE_PAGE if config.huge_pages else SMALL_PAGE)
        source = row_source(module._emb_modules, made.begins, checkpoint, f"{prefix}{tables_name}")
        shards = {table.name: table.shards for table in layouts_of(configs, params)}
        self._shared = SharedRows(
            group, name, deadline, made.tables, shards, source, config.huge_pages
        )
        self._views = made.move_to(self._shared.memory)
        self._version = self._versions()
        # It is not registered: its content has the names of the unsharded module here.
        self._unsharded = (module,)
        self._is_sequence = hasattr(module, "need_indices")
        self.add_module(tables_name, children)
        if module.register_tbes:
            self.tbes = module.tbes
        self._check = InputCheck(name, configs, is_weighted(module), config.bad_ids)

    @property
    def replaced_ids(self) -> int:
        """Returns how many ids had no row, so that row 0 was looked up (bad_ids="row0")."""
        return self._check.replaced_ids

    @property
    def unsharded_module_type(self) -> type:
        """Returns the class of the unsharded module; see TorchRec."""
        return type(self._unsharded[0])

    def create_context(self) -> _Context:
        """Returns a new context; see TorchRec."""
        return _Context()

    def input_dist(self, ctx: _Context, features: object) -> UnsentBatch:
        """Checks a batch. The batch stays where it is.

        Args:
            ctx: context of this forward.
            features: KeyedJaggedTensor on the CPU; its weights, if any, are float32. If it does not
                fit the module, ValueError is raised where the embeddings are used: first the model
                calls its other modules, which other ranks may wait for.

        Raises:
            ValueError: autograd is on, or the weights were written to.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self._where}: autograd is on, but quantized tables have no gradients: use "
                "torch.no_grad()"
            )
        if self._versions() != self._version:
            raise ValueError(
                f"{self._where}: its weights were written to, but its tables are sealed, and other "
                "ranks read them as they were. Load weights before the module is sharded, and "
                "shard anew to change them"
            )
        self.calls.note()
        try:
            return UnsentBatch(checked(self._check, features), ctx)
        except Exception as error:  # whatever a request holds, the fault is that request's
            ctx.refusal = ValueError(f"{self._where}: {error}")
            return UnsentBatch(self._check.nothing(), ctx)

    def compute(self, ctx: _Context, dist_input: UnsentBatch) -> Any:
        """Returns the embeddings, as the unsharded module does."""
        features = dist_input.batch.features
        if self._is_sequence:
            features = kept(features)  # the output has its lengths, and may have its ids
        return looked_up(self._unsharded[0], features, self._check)

    def output_dist(self, ctx: _Context, output: Any) -> LazyAwaitable[Any]:
        """Returns the finished embeddings, or raises when they are used; see `input_dist`."""
        embeddings = DirectEmbeddings(output, FIRST_VERSION)
        if ctx.refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, ctx.refusal, partial(take_part_in_the_rest, self))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of all buffers: no other rank needs them sent."""
        for name, _ in self.named_buffers(prefix):
            yield name

    def _versions(self) -> int:
        return sum([view._version for view in self._views])
