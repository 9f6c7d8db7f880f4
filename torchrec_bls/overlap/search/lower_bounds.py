"""The least time that all-reduces of the remaining layers add to a backward done in part."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_bls.overlap.search.backward import Backward, Floats

#: Into so many parts what is left of the backward is cut. More take longer, and prune more.
_CELLS = 256


class LowerBounds:
    """Lower bounds of V(l, c): the time that the groups after layer l add if c of the backward is
    done.

    V does not fall with c, and grows by at most `worth` a microsecond (docs/design/overlap.md).
    So bounds of V at the edges of cells also give bounds within the cells.

    Attributes:
        worth: (layers + 1), the fastest growth of V with c.
    """

    def __init__(self, backward: Backward) -> None:
        layers = backward.layers
        # The next group waits for another layer, so that less computed is no worse.
        self._least = np.append(backward.ready[1:], backward.ready[-1])
        self._cell = (backward.ready[-1] - self._least) / _CELLS
        self._per_cell = _inverse(self._cell)
        self._values = np.zeros((layers + 1, _CELLS + 1))
        self.worth = np.zeros(layers + 1)
        for layer in reversed(range(layers)):
            lasts = np.arange(layer + 1, layers + 1)
            edges = self._least[layer] + np.arange(_CELLS + 1) * self._cell[layer]
            added, after = backward.run(layer, lasts, edges)
            self._values[layer] = (added + self.at(lasts[:, None], after)).min(axis=(1, 2))
            # The last group begins when all is computed. So its part of V is the same everywhere.
            sent = backward.sent(layer, lasts[:-1])
            slopes = 1 - (sent.together - sent.alone) * _inverse(sent.hidden)
            self.worth[layer] = max(self.worth[layer + 1], slopes.max(initial=0.0))

    def at(self, layers: npt.ArrayLike, computed: Floats) -> Floats:
        """Returns bounds of V for numbers of layers sent and microseconds computed, broadcast."""
        layers = np.asarray(layers)
        place = np.maximum((computed - self._least[layers]) * self._per_cell[layers], 0.0)
        cell = np.minimum(place.astype(np.intp), _CELLS - 1)
        to_edge = np.maximum(cell + 1 - place, 0.0)
        below = self._values[layers, cell]
        worth = self.worth[layers] * self._cell[layers] * to_edge
        bounds: Floats = np.maximum(below, self._values[layers, cell + 1] - worth)
        return bounds


def _inverse(values: Floats) -> Floats:
    """Returns 1 / values, and 0 for 0."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
