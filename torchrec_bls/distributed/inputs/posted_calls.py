"""The calls of a module whose ids this rank has posted."""

import weakref
from typing import Any, NamedTuple

from torchrec.distributed.types import Awaitable

from torchrec_bls.collective.forwards import Forwards
from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote


class CallAhead(NamedTuple):
    """A call whose ids were posted outside of scopes.

    Attributes:
        ctx: TorchRec's context of the call, which its caller holds.
        ids: awaitable of its ids.
    """

    ctx: "weakref.ref[Any]"
    ids: Awaitable[Any]


class PostedCalls:
    """The calls of a module, from their ids to their rows.

    Args:
        forwards: forwards of the module, which number its calls.

    Attributes:
        newest: label of the newest call, and the message to all ranks along with its ids.
    """

    def __init__(self, forwards: Forwards) -> None:
        self.newest: tuple[int, IdsNote] = (0, NO_NOTE)
        self._forwards = forwards

    def begin(self, note: IdsNote) -> int:
        """Begins a call, and returns its label.

        Raises:
            ValueError: see Forwards.call.
        """
        label = self._forwards.call()
        self.newest = (label, note)
        return label

    def keep(self, label: int, ctx: Any, ids: Awaitable[Any]) -> None:
        """Keeps a call outside of scopes until it ends, or until its caller drops the context.

        TorchRec's pipelines drop that of a batch whose ids they post twice.
        """
        forwards = self._forwards
        forwards.ahead[label] = CallAhead(weakref.ref(ctx, lambda _: forwards.drop(label)), ids)

    def end(self, label: int) -> None:
        """Ends a call: this rank has sent its rows, or no rank will."""
        self._forwards.ahead.pop(label, None)

    def refuse(self, label: int) -> None:
        """Ends a call for which all ranks raise, where they wait for its ids."""
        self.end(label)
        self._forwards.refuse()
