"""The ids of lookups, noted within forwards and told to TorchRec's tracker later."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# New ids, 8 bytes each, after which those that repeat are left out.
_MOST_NEW = 1 << 22


class _Noted(NamedTuple):
    """Ids of some lookups.

    Attributes:
        keys: keys of the features.
        counts: number of ids of each key.
        ids: ids of one key behind those of the other.
    """

    keys: list[str]
    counts: list[int]
    ids: torch.Tensor


class LookupNotes:
    """Notes the ids of all lookups of a model's modules in place of a ModelDeltaTracker.

    The tracker takes each batch apart, and keeps a small tensor of each table. That takes up to as
    long as the forward itself. Here a forward copies its ids at once, and the tracker gets those of
    all batches together, each id once. However long that takes, the notes have at most twice as
    many ids as are different, and some millions.

    Args:
        tracker: ModelDeltaTracker of ids. Its modules tell these notes from now on, and not it.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._noted: list[_Noted] = []
        # Ids that were different when those that repeat were left out last, and ids since.
        self._different, self._new = 0, 0
        for module in tracker.get_tracked_modules().values():
            module.post_lookup_tracker_fn = self.note

    def note(self, features: KeyedJaggedTensor, *_: Any) -> None:
        """Notes the ids of a lookup, as TorchRec's modules tell them."""
        keys = features.keys()
        if not keys:  # this rank has no tables there
            return
        ids = features.values().clone()
        self._noted.append(_Noted(keys, features.length_per_key(), ids))
        self._new += len(ids)
        if self._new > max(_MOST_NEW, self._different):
            self._noted = list(_without_repeats(self._noted))
            self._different, self._new = sum(len(each.ids) for each in self._noted), 0

    def clear(self) -> None:
        """Forgets what was noted."""
        self._noted, self._different, self._new = [], 0, 0

    def tell_tracker(self) -> None:
        """Tells the tracker what was noted since."""
        noted = list(_without_repeats(self._noted))
        self.clear()
        for keys, counts, ids in noted:
            lengths = torch.tensor(counts, device=ids.device)
            self._tracker.record_lookup(KeyedJaggedTensor(keys, ids, lengths=lengths), ids)


def _without_repeats(noted: Iterable[_Noted]) -> Iterator[_Noted]:
    """Yields the ids of all lookups with the same keys together, each id of a key once."""
    batches = defaultdict(list)
    for keys, counts, ids in noted:
        batches[tuple(keys)].append(ids.split_with_sizes(counts))
    for keys_of_all, of_batches in batches.items():
        unique = [torch.unique(torch.cat(of_key)) for of_key in zip(*of_batches, strict=True)]
        yield _Noted(list(keys_of_all), [len(ids) for ids in unique], torch.cat(unique))
