"""The way of a module's batches to their embeddings, which its ranks choose together."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable

from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck


class Lookup(ABC):
    """Looks the batches of one module up. A batch comes to `check`, `post` and `output` in turn.

    Args:
        input_check: input check of the module.
    """

    #: Whether this rank reads the tables of all ranks itself.
    is_direct: ClassVar[bool]

    def __init__(self, input_check: InputCheck) -> None:
        self._input_check = input_check

    @abstractmethod
    def begin(self) -> None:
        """Begins a call by this thread.

        Raises:
            ValueError: the call can't be made now. Nothing is posted.
        """

    def check(self, features: object) -> CheckedBatch:
        """Returns `features` in the form for `post`. Tells the other ranks nothing.

        Raises:
            Exception: the features do not fit the module.
        """
        return self._input_check.check(features)

    @abstractmethod
    def post(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """Posts what the other ranks need for a batch, in TorchRec's two waits.

        Args:
            ctx: TorchRec's context of the batch.
            batch: batch from `check`, or without samples.
            note: message that goes along with the ids.
        """

    def refuse(self, ctx: Any, error: ValueError) -> Awaitable[Any]:
        """Posts a batch without samples for one that does not fit.

        The error stays in the context, as `bls_refusal`.
        """
        ctx.bls_refusal = error
        with torch.no_grad():
            return self.post(ctx, self._input_check.nothing())

    @abstractmethod
    def output(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """Returns the embeddings of a batch.

        Args:
            ctx: TorchRec's context of the batch.
            ids: what was waited for after `post`.
        """

    @abstractmethod
    def meet(self) -> None:
        """Meets the other ranks, if they have to meet before they post."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends the lookup. The ranks will choose one anew."""
