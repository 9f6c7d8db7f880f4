"""Lookups in tables that every rank can read: no other rank takes part in them."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.lookup import Lookup


class UnsentBatch(ExchangeAwaitable[Any], Multistreamable):  # type: ignore[misc]
    """The two waits of an input dist that sends nothing: the batch stays where it is.

    Attributes:
        awaitables: none. TorchRec's pipelines fuse the exchanges of sizes that are behind these.
    """

    awaitables: ClassVar[Sequence[Any]] = ()

    def __init__(self, batch: CheckedBatch) -> None:
        super().__init__()
        self.batch = batch

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        """Returns the features, of all shardings in one, for TorchRec's feature processors. They
        cannot do a batch without samples, which has nothing to process."""
        if self.batch.features.stride() > 0:
            yield self.batch.features

    def _wait_impl(self) -> "UnsentBatch":
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory for a stream, as TorchRec's pipelines ask for on a GPU. A batch
        of the host is none of a stream's."""
        if self.batch.is_on_gpu:
            self.batch.features.record_stream(stream)


class DirectLookup(Lookup):
    """Reads the rows of its own batches. Any number of threads may call it.

    Args:
        reads: tables to read.
        input_check: input check of the module.
        no_gradients: error under autograd, with the module's name.

    Attributes:
        reads: see above.
    """

    is_direct: ClassVar[bool] = True

    def __init__(self, reads: AnyReads, input_check: InputCheck, no_gradients: str) -> None:
        super().__init__(input_check)
        self.reads = reads
        self._no_gradients = no_gradients

    def begin(self) -> None:
        """See Lookup. Autograd must be off."""
        if torch.is_grad_enabled():
            raise ValueError(self._no_gradients)

    def check(self, features: object) -> CheckedBatch:
        """See Lookup."""
        return self._input_check.check(features, self.reads.under_way)

    def post(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> UnsentBatch:
        """See Lookup. No other rank needs anything. The batch stays in the context, as
        `bls_unsent`."""
        # TorchRec's feature processors make other features of it, and hand on these alone.
        ctx.bls_unsent = batch
        return UnsentBatch(batch)

    def output(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """See Lookup."""
        batch: CheckedBatch = ctx.bls_unsent
        if not isinstance(ids, UnsentBatch):
            for processed in ids:  # of a FeatureProcessedEmbeddingBagCollection, one at most
                late = self.reads.under_way
                batch = self._input_check.check_processed(processed, batch, late)
        return self.reads.output(batch)

    def meet(self) -> None:
        """Does nothing: the ranks have met when they chose this lookup."""

    def abandon(self) -> None:
        """See Lookup."""
        self.reads.abandon()
