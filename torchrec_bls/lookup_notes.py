"""The ids of lookups, noted within forwards and told to TorchRec's tracker later."""

from collections import defaultdict
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class LookupNotes:
    """Notes the ids of all lookups of a model's modules in place of a ModelDeltaTracker.

    The tracker takes each batch apart, and keeps a small tensor of each table. That takes up to as
    long as the forward itself. Here a forward copies its ids at once, and the tracker gets those of
    all batches together.

    Args:
        tracker: ModelDeltaTracker of ids. Its modules tell these notes from now on, and not it.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        # Keys, number of ids of each key, and the ids.
        self._noted: list[tuple[list[str], list[int], torch.Tensor]] = []
        for module in tracker.get_tracked_modules().values():
            module.post_lookup_tracker_fn = self.note

    def note(self, features: KeyedJaggedTensor, *_: Any) -> None:
        """Notes the ids of a lookup, as TorchRec's modules tell them."""
        keys = features.keys()
        if keys:  # else this rank has no tables there
            self._noted.append((keys, features.length_per_key(), features.values().clone()))

    def clear(self) -> None:
        """Forgets what was noted."""
        self._noted = []

    def tell_tracker(self) -> None:
        """Tells the tracker what was noted since."""
        noted, self._noted = self._noted, []
        batches = defaultdict(list)
        for keys, counts, ids in noted:
            batches[tuple(keys)].append(ids.split_with_sizes(counts))
        for keys_of_all, of_batches in batches.items():
            ids_of_keys = [torch.cat(of_key) for of_key in zip(*of_batches, strict=True)]
            lengths = torch.tensor([len(ids) for ids in ids_of_keys], device=ids_of_keys[0].device)
            together = KeyedJaggedTensor(list(keys_of_all), torch.cat(ids_of_keys), lengths=lengths)
            self._tracker.record_lookup(together, together.values())
