"""The tables of one generation, as lookups read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration
from torchrec_bls.distributed.inputs.input_check import CheckedBatch


@dataclass(frozen=True, slots=True)
class TablesView:
    """What one lookup reads. Nothing of it ever changes, so that a lookup which holds it needs no
    lock: neither a switch nor another thread's batch touches it.

    Attributes:
        where: name of the module and its rank, for messages.
        generation: generation that is read.
        keys: keys of the batch, in their order.
        order: places of the output's features among the keys.
        features: the features for native code; they keep the generation's memory.
        dtype: dtype of the weights.
        rows_read: rows read of each rank's shards, in all batches, int64 [ranks]; added to.
    """

    where: str
    generation: FloatGeneration
    keys: Sequence[str]
    order: Sequence[int]
    features: _native.ShardedFeatures
    dtype: torch.dtype
    rows_read: torch.Tensor

    def copy_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the rows of all ids to `out`, feature by feature, [ids, dim]."""
        values = batch.features.values()
        _native.copy_rows_directly(self.features, values, batch.counts, self.rows_read, out)

    def sum_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the pooled rows of all bags to `out`, [samples, columns]."""
        features = batch.features
        _native.sum_rows_directly(
            self.features,
            features.lengths(),
            features.values(),
            features.weights_or_none(),
            features.stride(),
            batch.counts,
            self.rows_read,
            out,
        )


class GenerationViews:
    """The view of one generation for the keys of the last batch.

    Args:
        generation: the generation.
        lookups_of: function that returns the lookups of a batch, in the order of the output, by its
            keys.
        where: see TablesView.
        dtype: see TablesView.
        rows_read: see TablesView.

    Attributes:
        generation: see above.
    """

    def __init__(
        self,
        generation: FloatGeneration,
        lookups_of: Callable[[Sequence[str]], Sequence[FeatureLookup]],
        where: str,
        dtype: torch.dtype,
        rows_read: torch.Tensor,
    ) -> None:
        self.generation = generation
        self._lookups_of = lookups_of
        self._where = where
        self._dtype = dtype
        self._rows_read = rows_read
        self._last: TablesView | None = None

    def of(self, keys: Sequence[str]) -> TablesView:
        """Returns the view for a batch with `keys`."""
        view = self._last
        if view is None or keys != view.keys:
            lookups = self._lookups_of(keys)
            self._last = view = TablesView(
                self._where,
                self.generation,
                list(keys),
                [lookup.key for lookup in lookups],
                self.generation.features(lookups),
                self._dtype,
                self._rows_read,
            )
        return view

    def next(self, generation: FloatGeneration) -> "GenerationViews":
        """Returns the views of another generation, with that of the last batch's keys made."""
        views = GenerationViews(
            generation, self._lookups_of, self._where, self._dtype, self._rows_read
        )
        last = self._last
        if last is not None:
            views.of(last.keys)
        return views
