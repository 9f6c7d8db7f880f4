"""The effects of groups of layers on the backward: modes.contention.stage for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.timeline import Layer

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Sent:
    """Times of groups' all-reduces, (groups, modes), microseconds.

    Attributes:
        together: time beside the backward.
        alone: time after the backward.
        hidden: backward that is done meanwhile, if it lasts so long.
    """

    together: Floats
    alone: Floats
    hidden: Floats


@dataclass(frozen=True)
class Backward:
    """A backward and the modes in which its gradients may travel.

    Attributes:
        ready: (layers + 1), microseconds of compute until gradients of so many layers are ready.
        bytes: (layers + 1), bytes of the gradients of so many layers.
        modes: (fields of ModeTimes, modes), the times of each mode.
    """

    ready: Floats
    bytes: Floats
    modes: Floats

    @classmethod
    def of(cls, layers: Sequence[Layer], modes: Sequence[ModeTimes]) -> Backward:
        """Returns the backward of layers in the order in which their gradients are ready.

        Raises:
            ValueError: `modes` is empty.
        """
        if not modes:
            raise ValueError("gradients need a mode to travel by: name at least one")
        return cls(
            np.cumsum([0.0, *(layer.compute_us for layer in layers)]),
            np.cumsum([0.0, *(layer.bytes for layer in layers)]),
            np.array([astuple(each) for each in modes]).T,
        )

    @property
    def layers(self) -> int:
        """Returns the number of layers."""
        return len(self.ready) - 1

    def sent(self, first: int, lasts: Ints) -> Sent:
        """Returns the times of all-reduces of the layers from `first` until before each of
        `lasts`."""
        size = (self.bytes[lasts] - self.bytes[first])[:, None]
        startup, per_byte, beside, rate, added_startup, added_compute = self.modes
        alone = np.where(size > 0, startup + size * per_byte, 0.0)
        together = np.where(size > 0, startup + added_startup + size * beside, 0.0)
        # An all-reduce that takes no time leaves no time to compute more in.
        hidden = together * rate + np.where(together > 0, added_compute, 0.0)
        return Sent(together, alone, hidden)

    def run(self, first: int, lasts: Ints, computed: Floats) -> tuple[Floats, Floats]:
        """Returns what groups that begin at `first` add, and how much is computed after them.

        Args:
            first: first of the groups' layers.
            lasts: (groups), the layer after each group's last.
            computed: (states), microseconds of the backward that are done.

        Returns:
            Two arrays (states, groups, modes). The first has microseconds beyond the backward's
            own time; waiting for gradients adds nothing, since the backward goes on meanwhile.
            The second has microseconds of the backward that are done.
        """
        sent = self.sent(first, lasts)
        begin = np.maximum(computed[:, None], self.ready[lasts])[:, :, None]
        some = np.where(sent.hidden > 0, sent.hidden, 1.0)
        # The part of the all-reduce that fits beside the rest of the backward.
        part = np.minimum((self.ready[-1] - begin) / some, 1.0)
        added = sent.alone + part * (sent.together - sent.hidden - sent.alone)
        return added, begin + part * sent.hidden
