"""Rows that a batch looked up in a table, in a frame that goes from one rank to another
(docs/wire-format.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from torchrec_bls import _native
from torchrec_bls.analysis.samples import Floats, Lookup
from torchrec_bls.codecs.compression import Compression
from torchrec_bls.codecs.error_bound import ErrorBound, bound_at

_FP32 = 0


class Frame:
    """A frame of one table's rows, which can be encoded and decoded again and again.

    Args:
        lookups: lookups of the table's features in one batch.
        stages: stages that the rows go through.
        bound: bound of the error, where the stages round.
        pooled: whether bags have a row each.
        weighted: whether ids have weights. Then bags of equal ids may have different rows, and
            equal rows are not looked for.

    Attributes:
        bytes: bytes of the frame.
        received: decoded rows of each feature.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        stages: Compression,
        bound: float,
        *,
        pooled: bool,
        weighted: bool,
    ) -> None:
        self._rows = torch.from_numpy(np.concatenate([lookup.rows for lookup in lookups]))
        self._received = torch.zeros_like(self._rows)
        self._counts = [len(lookup.rows) for lookup in lookups]
        by_feature = torch.split(self._received, self._counts)
        self.received: list[Floats] = [each.numpy() for each in by_feature]
        self._ids = torch.from_numpy(np.concatenate([lookup.ids for lookup in lookups]))
        lengths = torch.from_numpy(np.concatenate([lookup.lengths for lookup in lookups]))
        # Without lengths, each id is a bag of one id.
        self._lengths = lengths if pooled else None
        self._blocks = [
            (len(lookup.rows), len(lookup.ids), stages.unique and not weighted)
            for lookup in lookups
        ]
        columns = self._rows.shape[1]
        coded = (_FP32, columns, 0.0, False)
        if stages.bounded:
            is_fixed = stages is Compression.FIXED
            coded = (_native.ERROR_BOUNDED, columns, bound_at(ErrorBound(bound), 0), is_fixed)
        self._features = _native.CodedFeatures([coded] * len(lookups))
        self._first_rows = [0, *accumulate(self._counts)][: len(lookups)]
        self.bytes = _native.encode_frame(self._frame(self._rows))
        self._out = torch.zeros(self.bytes, dtype=torch.uint8)

    def encode(self) -> None:
        """Finds equal rows by their ids, if the stages ask for it, and encodes."""
        _native.encode_frame(self._frame(self._rows), self._out)

    def decode(self) -> None:
        """Decodes as the receiver does, which has the ids as well."""
        _native.decode_frame(self._out, self._frame(self._received))

    def _frame(self, rows: torch.Tensor) -> _native.Frame:
        place = self._features, rows, self._first_rows, self._counts
        if not any(wanted for _, _, wanted in self._blocks):
            return _native.Frame.one_below_another(*place)
        equal = _native.EqualBags(self._lengths, self._ids, self._blocks)
        return _native.Frame.one_below_another(*place, equal, list(range(len(self._blocks))))


def rounded(rows: Floats, bound: float) -> Floats:
    """Returns (rows, columns) as they arrive, rounded within `bound`."""
    lookup = Lookup.nothing(rows.shape[1])._replace(rows=rows)
    # The frame is that of weighted bags, where equal rows are not looked for: each row is rounded
    # alone.
    frame = Frame([lookup], Compression.HUFFMAN, bound, pooled=True, weighted=True)
    frame.encode()
    frame.decode()
    return frame.received[0]
