"""The groups and modes with which a backward ends soonest: label-setting dynamic programming.

This follows LIBRA, section IV, but without its grid of chunks and its limit of groups. So the
result is the optimum, not a plan within (K - 1) / Z of it. docs/design/overlap.md shows why, and
why no group is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.backward import Backward, Floats
from torchrec_bls.overlap.search.lower_bounds import LowerBounds
from torchrec_bls.overlap.search.timeline import Group, Layer

#: Of the labels of a layer, how many the first search keeps, whose plan prunes the second.
_BEAM = 8
#: Of the time in all: plans that are better by less are as good.
_SLACK = 1e-13
# Rows of labels: microseconds added to the backward's own time, and microseconds of it done; then
# where the label came from: the layer and the number of the label before, and the mode.
_ADDED, _COMPUTED, _LAYER, _LABEL, _MODE = range(5)


@dataclass(frozen=True)
class _BestPlan:
    added: float
    groups: tuple[Group, ...] = ()


def allocate(layers: Sequence[Layer], modes: Sequence[ModeTimes]) -> list[Group]:
    """Returns the groups whose timeline finishes first, of all fusions, modes and holds.

    Args:
        layers: layers in the order in which their gradients are ready.
        modes: modes to choose from for each group.

    Raises:
        ValueError: there is no mode.
    """
    backward = Backward.of(layers, modes)
    if not layers:
        return []
    bounds = LowerBounds(backward)
    some = _search(backward, bounds, _BestPlan(np.inf), _BEAM)
    return list(_search(backward, bounds, some).groups)


def _search(
    backward: Backward, bounds: LowerBounds, found: _BestPlan, beam: int | None = None
) -> _BestPlan:
    """Returns a plan better than `found`, or else `found`. A beam limits the labels of a layer."""
    count = backward.layers
    reached: list[list[Floats]] = [[] for _ in range(count)]
    reached[0].append(np.zeros((5, 1)))
    settled: list[Floats] = []
    for layer in range(count):
        labels = _undominated(reached[layer], bounds.worth[layer])
        reached[layer] = []
        if beam is not None and labels.shape[1] > beam:
            least = labels[_ADDED] + bounds.at(layer, labels[_COMPUTED])
            labels = labels[:, np.argsort(least)[:beam]]
        settled.append(labels)
        if not labels.shape[1]:
            continue
        lasts = np.arange(layer + 1, count + 1)
        added, computed = backward.run(layer, lasts, labels[_COMPUTED])
        added += labels[_ADDED][:, None, None]
        label, mode = np.unravel_index(added[:, -1].argmin(), added[:, -1].shape)
        if added[label, -1, mode] < found.added:
            groups = _groups(settled, layer, int(label), count, int(mode))
            found = _BestPlan(float(added[label, -1, mode]), groups)
        worse = found.added - _SLACK * (backward.ready[-1] + found.added)
        promising = added + bounds.at(lasts[:, None], computed) < worse
        for number in np.flatnonzero(promising[:, :-1].any(axis=(0, 2))):
            label_of, mode_of = np.nonzero(promising[:, number])
            new = np.empty((5, len(label_of)))
            new[_ADDED] = added[label_of, number, mode_of]
            # Exact without any assumption: the group after this one waits for another layer.
            ready = backward.ready[lasts[number] + 1]
            new[_COMPUTED] = np.maximum(computed[label_of, number, mode_of], ready)
            new[_LAYER], new[_LABEL], new[_MODE] = layer, label_of, mode_of
            reached[lasts[number]].append(new)
    return found


def _undominated(labels: list[Floats], worth: float) -> Floats:
    """Returns labels of a layer, without those that surely end no earlier than another one.

    A label A dominates B if `added` of A + worth * max(0, computed of A - computed of B) is at most
    `added` of B. For V does not fall with what is computed, and grows by at most `worth`.
    In the paper's terms:
    - A has less computed, and adds no more. A may compute alone until it has as much as B, and is
      no later then. For given groups that takes Assumption 3 (Lemma 4). For free groups, as here,
      it always holds: gradients that should wait had better go with the last group.
    - A is no later and has no less computed. That takes Assumption 2 (Lemma 3) in each mode, by
      which `worth` is at most 1. If a mode sends faster beside a backward than alone, `worth` is
      above 1, and this rule is stricter.
    """
    if not labels:
        return np.empty((5, 0))
    together = np.concatenate(labels, axis=1)
    together = together[:, np.lexsort((together[_ADDED], together[_COMPUTED]))]
    added = together[_ADDED]
    least_before = np.append(np.inf, np.minimum.accumulate(added)[:-1])
    together = together[:, added < least_before]
    value = together[_ADDED] + worth * together[_COMPUTED]
    least_after = np.append(np.minimum.accumulate(value[::-1])[::-1][1:], np.inf)
    return together[:, value < least_after]


def _groups(
    settled: list[Floats], layer: int, label: int, last: int, mode: int
) -> tuple[Group, ...]:
    """Returns the groups up to one from `layer` to `last`, which follows a label there."""
    groups = [Group(last - layer, mode)]
    while layer:
        _, _, before, number, mode_before = settled[layer][:, label]
        groups.append(Group(layer - int(before), int(mode_before)))
        layer, label = int(before), int(number)
    return tuple(reversed(groups))
