"""The way of a module's batches to their embeddings, which its ranks choose together."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable

from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.input_check import CheckedBatch

NO_NOTE = IdsNote()


class Lookup(ABC):
    """Looks the batches of one module up. A batch comes to `check`, `post` and `output` in turn.

    Args:
        check: function that returns a batch in the form for `post`. It raises for one that does not
            fit the module.
    """

    #: Whether this rank reads the tables of all ranks itself.
    is_direct: ClassVar[bool]

    def __init__(self, check: Callable[[object], CheckedBatch]) -> None:
        self._check = check

    @abstractmethod
    def begin(self, module: object) -> None:
        """Begins a call of `module` by this thread.

        Raises:
            ValueError: the call can't be made now. Nothing is posted.
        """

    def check(self, features: object) -> CheckedBatch:
        """Returns `features` in the form for `post`. Tells the other ranks nothing.

        Raises:
            Exception: the features do not fit the module.
        """
        return self._check(features)

    @abstractmethod
    def post(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """Posts what the other ranks need for a batch, in TorchRec's two waits.

        Args:
            ctx: TorchRec's context of the batch.
            batch: batch from `check`, or without samples.
            note: message that goes along with the ids.
        """

    def refuse(self, ctx: Any, error: ValueError, nothing: CheckedBatch) -> Awaitable[Any]:
        """Posts `nothing`, a batch without samples, for a batch that does not fit.

        The error stays in the context, as `bls_refusal`.
        """
        ctx.bls_refusal = error
        with torch.no_grad():
            return self.post(ctx, nothing)

    @abstractmethod
    def output(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """Returns the embeddings of a batch.

        Args:
            ctx: TorchRec's context of the batch.
            ids: what was waited for after `post`.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Ends the lookup. The ranks will choose one anew."""
