"""Lookups of a quantized module in the rows of all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.layout import Shard
from torchrec_bls.direct.reads.direct_lookup import DirectLookup
from torchrec_bls.direct.reads.direct_reads import DirectEmbeddings
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.quant.batches import NO_GRADIENTS, looked_up
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.shared_rows import HUGE_PAGE, SMALL_PAGE, SharedRows
from torchrec_bls.quant.stored_tables import RowSource


class StoredReads:
    """Looks batches up with TorchRec's own module, whose weights are the rows of all ranks.

    Args:
        where: name of the module and its rank.
        module: TorchRec's quantized module, which looks up in `rows`.
        rows: rows of all ranks.
        views: tensors through which the weights may be written to.
        input_check: input check of the sharded module.

    Attributes:
        rows: see above. They are kept, so that tables outlive their owners.
    """

    def __init__(
        self,
        where: str,
        module: Any,
        rows: SharedRows,
        views: Sequence[torch.Tensor],
        input_check: InputCheck,
    ) -> None:
        self._where = where
        self._module = module
        self.rows = rows
        self._views = views
        self._version = self._versions()
        self._input_check = input_check
        self._is_sequence = hasattr(module, "need_indices")

    def output(self, batch: CheckedBatch) -> DirectEmbeddings:
        """Returns the embeddings of a batch, as the unsharded module does.

        Raises:
            ValueError: the weights were written to.
        """
        if self._versions() != self._version:
            raise ValueError(
                f"{self._where}: its weights were written to, but its tables are sealed, and other "
                "ranks read them as they were. Load weights before the module is sharded, and "
                "shard anew to change them"
            )
        features = batch.features
        if self._is_sequence:
            features = kept(features)  # the output has its lengths, and may have its ids
        embeddings = looked_up(self._module, features, self._input_check)
        return DirectEmbeddings(embeddings, FIRST_VERSION)

    def abandon(self) -> None:
        """Does nothing: only the ranks of the module read the rows."""

    def _versions(self) -> int:
        return sum([view._version for view in self._views])


def page_bytes(config: BLSConfig) -> int:
    """Returns the size of the pages that rows are cut by, in bytes."""
    return HUGE_PAGE if config.huge_pages else SMALL_PAGE


def direct_lookup(
    state: ModuleState,
    module: Any,
    lookups: Lookups,
    shards: Mapping[str, Sequence[Shard]],
    source: RowSource,
) -> DirectLookup:
    """Puts a module's rows where all ranks of the host read them, collectively.

    Args:
        state: state of the sharded module.
        module: TorchRec's quantized module, whose own weights are freed.
        lookups: lookups of the module.
        shards: shards of each table, by its name.
        source: source of the rows.

    Raises:
        ValueError: the checkpoint lacks rows of this rank; the other ranks raise RendezvousError.
        RendezvousError: a rank did not come, has no memory for its shards, or has other weights.
    """
    exchanges, check = state.exchanges, state.input_check
    group, config = exchanges.group, exchanges.config
    rows = SharedRows(
        group,
        exchanges.name,
        timeout_of(group) if config.deadline is None else config.deadline,
        lookups.tables,
        shards,
        source,
        config.huge_pages,
    )
    reads = StoredReads(state.where, module, rows, lookups.move_to(rows.memory), check)
    no_gradients = f"{state.where}: {NO_GRADIENTS}"
    return DirectLookup(reads, check, no_gradients)
