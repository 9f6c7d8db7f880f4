"""An embedding module in a process that reads tables which others have shared."""

from typing import Any

import torch
from torch import nn

from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode


class AttachedCollection(nn.Module):
    """Replaces an EmbeddingBagCollection or EmbeddingCollection in a model, float or quantized.

    It gives the results of the sharded modules that share the tables, at once and without waiting.
    It has no parameters: its tables are read where they lie.

    Args:
        reads: the tables.
        input_check: check of the input.

    Attributes:
        direct_reads: see above.
        input_check: see above.
    """

    def __init__(self, reads: DirectReads[Any], input_check: InputCheck) -> None:
        super().__init__()
        self.direct_reads = reads
        self.input_check = input_check

    @property
    def version(self) -> str:
        """Returns the version of the weights that the last batch saw."""
        return self.direct_reads.version

    @property
    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although their process is gone."""
        return self.direct_reads.tables.owners_gone()

    @property
    def replaced_ids(self) -> int:
        """Returns how many ids got row 0 instead, by bad_ids="row0"."""
        return self.input_check.replaced_ids

    def wait_checked(self) -> None:
        """See BoundedLagModule."""
        self.direct_reads.wait_checked(self.input_check)

    @outside_inference_mode
    def forward(self, features: object) -> Any:
        """Returns the embeddings of a batch.

        Args:
            features: features of the batch, a KeyedJaggedTensor on the CPU; or on the GPU that
                reads the tables, unless these are quantized.

        Returns:
            A KeyedTensor, [samples, columns], or a JaggedTensor, [ids, columns], of each feature by
            name.

        Raises:
            ValueError: the batch does not fit the module, or autograd is on.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self.direct_reads.where}: autograd is on, but tables that are read directly do "
                "not change: use torch.no_grad()"
            )
        try:
            batch = self.input_check.check(features, self.direct_reads.under_way)
        except Exception as error:  # whatever a request holds, the fault is that request's
            raise ValueError(f"{self.direct_reads.where}: {error}") from error
        return self.direct_reads.output(batch).wait()
