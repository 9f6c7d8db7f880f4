"""Lookups by the ranks that have the rows: ids go to them, and embeddings come back."""

from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable

from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.distributed.outputs.staged_output import copied_to
from torchrec_bls.errors import RankFailedError

_BROKE_OFF = (
    "a forward failed in a pipeline, which was dropped or reset after it had posted ids of a later "
    "batch, and other ranks wait for rows of that one. Shard the model anew on all ranks"
)


def _nothing_to_record(stream: object) -> None:
    pass


class Dists(Protocol):
    """The input dist, lookups and output dist of a module."""

    def post(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """Posts the ids of a batch. Once they are waited for, the sharding contexts have their
        layout."""

    def look_up(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """Looks up the ids that have arrived, and posts their embeddings."""


class ExchangeLookup(Lookup):
    """Posts ids, and answers those of the other ranks. All ranks do it alike, or all fail. Where
    outputs are on a GPU, they are copied to it when they are waited for.

    Args:
        state: state of the module.
        dists: dists of the module.
        no_gradients: reason why nothing can be looked up under autograd; empty if it can.
    """

    is_direct: ClassVar[bool] = False

    def __init__(self, state: ModuleState, dists: Dists, no_gradients: str) -> None:
        super().__init__(state.input_check)
        self._state = state
        self._dists = dists
        self._no_gradients = no_gradients

    def begin(self) -> None:
        """See Lookup. Only one thread, or the module's pipeline, may call at a time."""
        self._state.callers.enter()

    def check(self, features: object) -> CheckedBatch:
        """See Lookup."""
        if self._no_gradients and torch.is_grad_enabled():
            raise ValueError(self._no_gradients)
        return self._input_check.check(features)

    def post(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """See Lookup. The first call makes channels, collectively."""
        state = self._state
        state.exchanges.deadline.training = torch.is_grad_enabled()
        state.meet()
        if state.forwards.broke_off:
            state.fail(_BROKE_OFF)
            raise RankFailedError(f"{state.where}: {_BROKE_OFF}")
        if state.gpu is not None:
            # TorchRec's pipelines call it for a GPU's tensors, and all that ctx has is the host's.
            ctx.record_stream = _nothing_to_record
        label = ctx.bls_label = state.calls.begin(note)
        try:
            posted = self._dists.post(ctx, batch)
        except BaseException as error:
            state.fail_all("posting ids", error)
            raise
        # BoundedLagPipeline has notes, and answers what it has posted itself.
        if note is NO_NOTE and state.forwards.ahead:
            state.forwards.keep(label, ctx, posted)
        return posted

    def refuse(self, ctx: Any, error: ValueError) -> Awaitable[Any]:
        """See Lookup. In training the error goes to all ranks, none of which may go on."""
        if torch.is_grad_enabled() and not self._no_gradients:
            return self.post(ctx, self._input_check.nothing(), IdsNote(refusal=str(error)))
        return super().refuse(ctx, error)

    def output(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """See Lookup."""
        try:
            embeddings = self._dists.look_up(ctx, ids)
        except BaseException as error:
            self._state.fail_all("lookup", error)
            raise
        self._state.forwards.answered(ctx.bls_label)
        if self._state.gpu is not None:
            embeddings.callbacks.append(partial(copied_to, self._state.gpu))
        return embeddings

    def meet(self) -> None:
        """See Lookup. Makes the channel that each call posts first to, collectively."""
        state = self._state
        state.exchanges.deadline.training = torch.is_grad_enabled()
        state.meet()
        try:
            state.open_calls_channel()
        except BaseException as error:
            state.fail_all("setting up a channel", error)
            raise

    def abandon(self) -> None:
        """Does nothing: the exchanges stay, and belong to the module."""
