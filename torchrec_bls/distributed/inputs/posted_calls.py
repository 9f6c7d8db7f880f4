"""The calls of a module whose ids this rank has posted."""

from torchrec_bls.collective.forwards import Forwards
from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote


class PostedCalls:
    """The calls of a module, as its input dists see them.

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

    def refuse(self, label: int) -> None:
        """Ends a call for which all ranks raise, where they wait for its ids."""
        self._forwards.answered(label)
        self._forwards.refuse()
