"""A quantized embedding module whose tables are in several processes' memory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyAwaitable, ParameterSharding, ShardedModule

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.layout import layouts_of
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.quant.batches import FullQuantInputCheck, is_weighted
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.stored_dists import STORED, exchange_lookup
from torchrec_bls.quant.stored_reads import direct_lookup
from torchrec_bls.quant.stored_tables import row_source


class ShardedQuantCollection(BoundedLagModule, ShardedModule[Any, Any, Any, Any]):  # type: ignore[misc]
    """TorchRec's quantized EmbeddingBagCollection or EmbeddingCollection over several processes.

    Results are those of the unsharded module, bit for bit: its own kernels look up a batch in rows
    as FBGEMM stores them. The module chooses its lookup while it is sharded, since its rows lie
    elsewhere for each:

    - Read directly, each rank's shards are in shared memory, and the state dict is that of the
      unsharded module, on every rank. After this constructor no rank waits for another one.
    - Exchanged, each rank's shards are in its own memory, and the state dict has its rows of each
      table. A batch asks the ranks for its distinct rows.

    Args:
        module: module to shard, for which `why_not` has no reason. It is taken over, and its own
            weights are freed.
        tables_name: name of its nn.ModuleDict that has the tables.
        params: plan of the module.
        group: group of ranks; one of them has each shard.
        config: configuration of the sharder.
        reads_directly: whether to read directly; all ranks are on one host then.
        name: name of the module.
        checkpoint: see BLSQuantEmbeddingBagCollectionSharder.
        prefix: prefix of the tables' names in the checkpoint.
        gpu: GPU that outputs are on; None: they are on the host.

    Raises:
        ValueError: the checkpoint lacks rows of this rank. The other ranks raise RendezvousError,
            here or at their first batch.
        RendezvousError: a rank did not come, has no memory for its shards, or has other weights.
    """

    is_quantized: ClassVar[bool] = True
    _input_checks: ClassVar[type[InputCheck]] = FullQuantInputCheck

    def __init__(
        self,
        module: Any,
        tables_name: str,
        params: Mapping[str, ParameterSharding],
        group: dist.ProcessGroup,
        config: BLSConfig,
        reads_directly: bool,
        name: str,
        checkpoint: Mapping[str, torch.Tensor] | None,
        prefix: str,
        gpu: Gpu | None = None,
    ) -> None:
        super().__init__()
        configs = [each for tables in module._key_to_tables.values() for each in tables]
        self._init_bounded_lag(
            replace(config, lookup="direct" if reads_directly else "exchange"),
            group,
            name,
            configs,
            params,
            is_weighted(module),
            [STORED],
            gpu,
        )
        children: nn.ModuleDict = getattr(module, tables_name)
        lookups = Lookups(module, children, config.huge_pages if reads_directly else False)
        source = row_source(
            module._emb_modules, lookups.begins, checkpoint, f"{prefix}{tables_name}."
        )
        layouts = [table.in_whole_rows() for table in layouts_of(configs, params)]
        lookup_of = direct_lookup if reads_directly else exchange_lookup
        self._lookup = lookup_of(self._bls, module, lookups, layouts, source)
        self.choose_lookup()
        # It is not registered: its content has the names of the unsharded module here.
        self._unsharded = (module,)
        self.add_module(tables_name, children)
        if module.register_tbes:
            self.tbes = module.tbes

    def _choose(self) -> Lookup:
        return self._lookup  # the rows lie where no other one finds them

    @property
    def unsharded_module_type(self) -> type:
        """Returns the class of the unsharded module; see TorchRec."""
        return type(self._unsharded[0])

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Returns a new context; see TorchRec."""
        return EmbeddingBagCollectionContext()

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        """Returns the result of `output_dist`."""
        return self.compute_and_output_dist(ctx, dist_input)

    def output_dist(self, ctx: Any, output: Any) -> LazyAwaitable[Any]:
        """Returns `output`."""
        awaitable: LazyAwaitable[Any] = output
        return awaitable

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of all buffers: no other rank needs them sent."""
        for name, _ in self.named_buffers(prefix):
            yield name
