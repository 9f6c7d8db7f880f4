"""Lookups of a quantized module in the rows of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.reads.direct_reads import DirectEmbeddings
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.quant.batches import looked_up
from torchrec_bls.quant.shared_rows import SharedRows


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
