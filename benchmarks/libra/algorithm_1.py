"""LIBRA's own dynamic programming, on a grid: Algorithm 1, and thread allocation alone (Eq. 17)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.backward import Backward, Floats, Ints
from torchrec_bls.overlap.search.timeline import Group, Layer


def algorithm_1(
    layers: Sequence[Layer], modes: Sequence[ModeTimes], *, groups: int = 10, chunks: int = 150
) -> list[Group]:
    """Returns the groups that Algorithm 1 finds; its K is `groups`, its Z `chunks`.

    Where Assumptions 1 to 3 hold, the timeline finishes within (K - 1) / Z of the optimum of as
    many groups. The search compares all-reduces that begin at edges of chunks. Where Assumption 3
    fails, the timeline may finish later than the search assumes.

    Raises:
        ValueError: there is no mode, or no group or chunk.
    """
    return _Grid(layers, modes, chunks).groups(_at_most(groups, len(layers)))


def allocate_modes(
    layers: Sequence[Layer],
    fusion: Sequence[int],
    modes: Sequence[ModeTimes],
    *,
    chunks: int = 150,
) -> list[Group]:
    """Returns groups of given numbers of layers with the modes that Eq. 17 finds: LIBRA-M.

    Raises:
        ValueError: there is no mode or chunk, or the groups have another number of layers.
    """
    if sum(fusion) != len(layers) or any(count <= 0 for count in fusion):
        raise ValueError(f"groups of {list(fusion)} layers are not {len(layers)}")
    ends = [0, *np.cumsum(fusion)]
    return _Grid(layers, modes, chunks).groups(
        [[(int(begin), np.array([end]))] for begin, end in pairwise(ends)]
    )


def _at_most(groups: int, layers: int) -> list[list[tuple[int, Ints]]]:
    """Returns, for each number of groups, where the next group may begin and end."""
    if groups < 1:
        raise ValueError(f"layers are at least one group, not {groups}")
    first: list[tuple[int, Ints]] = [(0, np.arange(1, layers + 1))]
    others = [(begin, np.arange(begin + 1, layers + 1)) for begin in range(1, layers)]
    return [first, *([others] * (min(groups, layers) - 1))]


class _Grid:
    """T(i, l, z), without the time of z chunks of computing, which is in all of it."""

    def __init__(self, layers: Sequence[Layer], modes: Sequence[ModeTimes], chunks: int) -> None:
        if chunks < 1:
            raise ValueError(f"a backward is at least one chunk, not {chunks}")
        self._backward = Backward.of(layers, modes)
        self._chunks = chunks
        self._width = self._backward.ready[-1] / chunks
        # GetMinChunkID counts up to the last chunk's edge and, where sums are rounded, beyond it.
        self._first = np.minimum(self._to_edge(self._backward.ready), chunks)

    def _to_edge(self, compute: Floats) -> Ints:
        """Returns how many chunks so much compute takes part in."""
        if not self._width:
            return np.where(compute > 0, self._chunks + 1, 0)
        edges: Ints = np.ceil(compute / self._width * (1 - 1e-12)).astype(np.intp)
        return edges

    def groups(self, rounds: Sequence[Sequence[tuple[int, Ints]]]) -> list[Group]:
        """Returns the best plan. A round says where its group may begin, and what may follow it."""
        count, edges = self._backward.layers, self._chunks + 1
        if not count:
            return []
        added = np.full((count + 1, edges), np.inf)
        added[0] = 0.0
        logs, best = [], (np.inf, 0)
        for number, begins in enumerate(rounds):
            longer = np.full((count + 1, edges), np.inf)
            log = np.zeros((3, count + 1, edges), np.intp)
            for begin, ends in begins:
                if np.isfinite(added[begin, -1]):
                    self._extend(added[begin], begin, ends, longer, log)
            logs.append(log)
            added = longer
            best = min(best, (added[count, -1], number))
        layer, edge, found = count, self._chunks, []
        for log in reversed(logs[: best[1] + 1]):
            before, edge_before, mode = log[:, layer, edge]
            found.append(Group(int(layer - before), int(mode)))
            layer, edge = before, edge_before
        return found[::-1]

    def _extend(self, before: Floats, first: int, lasts: Ints, longer: Floats, log: Ints) -> None:
        """Enters groups that begin with one layer into T of one group more.

        While chunks are left, a group adds the same time wherever it begins. Several edges lead to
        one edge in time; only the best so far counts. So Z^2 pairs of edges become Z.
        """
        sent = self._backward.sent(first, lasts)
        far = self._to_edge(sent.hidden)
        # Edges that the group's own compute rules out; then the best edge so far, (groups, edges).
        edges = np.arange(self._chunks + 1)
        allowed = np.where(edges >= self._first[lasts][:, None], before, np.inf)
        least = np.minimum.accumulate(allowed, axis=1)
        origin = np.maximum.accumulate(np.where(allowed == least, edges, 0), axis=1)
        rows = np.arange(len(lasts))[:, None]
        for mode in range(far.shape[1]):
            place = np.maximum(edges - far[:, mode, None], 0)
            value = least[rows, place] + (sent.together - sent.hidden)[:, mode, None]
            value[edges < far[:, mode, None]] = np.inf
            self._enter(longer, log, lasts, value, (first, origin[rows, place], mode))
        # A group may also go on to the end, and beyond it.
        begin = np.minimum(edges * self._width, self._backward.ready[-1])
        to_end, _ = self._backward.run(first, lasts, begin)
        ending = allowed[:, :, None] + to_end.transpose(1, 0, 2)
        flat = ending.reshape(len(lasts), -1)
        number = flat.argmin(axis=1)
        edge, mode_of = np.unravel_index(number, ending.shape[1:])
        value = np.full((len(lasts), self._chunks + 1), np.inf)
        value[:, -1] = flat[rows[:, 0], number]
        self._enter(longer, log, lasts, value, (first, edge[:, None], mode_of[:, None]))

    @staticmethod
    def _enter(
        longer: Floats, log: Ints, lasts: Ints, value: Floats, how: tuple[int, Ints, int | Ints]
    ) -> None:
        better = value < longer[lasts]
        longer[lasts] = np.where(better, value, longer[lasts])
        for entry, new in zip(log, how, strict=True):
            entry[lasts] = np.where(better, new, entry[lasts])
