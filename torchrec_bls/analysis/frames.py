"""Rows that a batch looked up in a table, in a frame that goes from one rank to another
(docs/wire-format.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_bls import _native
from torchrec_bls.analysis.samples import Floats, Lookup
from torchrec_bls.codecs.error_bound import ErrorBound
from torchrec_bls.codecs.stages import Stages

_FP32 = 0
_EIGHT_BYTES = np.dtype(np.int64).itemsize


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
        stages: Stages,
        bound: float,
        *,
        pooled: bool,
        weighted: bool,
    ) -> None:
        self._rows = [np.ascontiguousarray(lookup.rows) for lookup in lookups]
        self.received = [np.zeros_like(rows) for rows in self._rows]
        self._ids = np.concatenate([lookup.ids for lookup in lookups])
        lengths = np.concatenate([lookup.lengths for lookup in lookups])
        # Without lengths, each id is a bag of one id.
        self._lengths = lengths if pooled else None
        self._blocks = [
            (len(lookup.rows), len(lookup.ids), stages.unique and not weighted)
            for lookup in lookups
        ]
        coded = (_native.ERROR_BOUNDED, ErrorBound(bound).at(0), stages is Stages.FIXED)
        codec, *how = coded if stages.bounded else (_FP32, 0.0, False)
        columns = [rows.shape[1] for rows in self._rows]
        self._features = _native.CodedFeatures([(codec, each, *how) for each in columns])
        self._counts = [len(rows) for rows in self._rows]
        self._strides = columns
        self._sent = [rows.ctypes.data for rows in self._rows]
        self._arrived = [rows.ctypes.data for rows in self.received]
        groups = self._find_groups()
        self.bytes = _native.encode_frame(self._frame(self._sent, groups), 0, 0)
        self._out = np.zeros(self.bytes, np.uint8)
        self._address = self._out.ctypes.data

    def encode(self) -> None:
        """Finds equal rows by their ids, if the stages ask for it, and encodes."""
        groups = self._find_groups()
        _native.encode_frame(self._frame(self._sent, groups), self._address, self.bytes)

    def decode(self) -> None:
        """Decodes as the receiver does, which has the ids as well."""
        groups = self._find_groups()
        _native.decode_frame(self._address, self.bytes, self._frame(self._arrived, groups))

    def _find_groups(self) -> _native.EqualBags | None:
        if not any(wanted for _, _, wanted in self._blocks):
            return None
        lengths = self._lengths
        return _native.EqualBags(
            (0 if lengths is None else lengths.ctypes.data, _EIGHT_BYTES),
            len(self._ids) if lengths is None else len(lengths),
            (self._ids.ctypes.data, _EIGHT_BYTES),
            len(self._ids),
            self._blocks,
        )

    def _frame(self, addresses: list[int], equal: _native.EqualBags | None) -> _native.Frame:
        groups = [] if equal is None else equal.groups
        return self._features, addresses, self._counts, self._strides, groups


def rounded(rows: Floats, bound: float) -> Floats:
    """Returns (rows, columns) as they arrive, rounded within `bound`."""
    lookup = Lookup.nothing(rows.shape[1])._replace(rows=rows)
    # The frame is that of weighted bags, where equal rows are not looked for: each row is rounded
    # alone.
    frame = Frame([lookup], Stages.HUFFMAN, bound, pooled=True, weighted=True)
    frame.encode()
    frame.decode()
    return frame.received[0]
