"""The lookup that a bounded-lag exchange does by itself, where nothing is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_bls import _native
from torchrec_bls.slot_size import SMALLEST_SLOT_BYTES, wanted_slot_bytes

from .configurations import Integers

_DEADLINE_S = 60.0
_NOBODY_WAITS = (False, None, 0, (0, 0, 0))


class OwnReading:
    """Reads the rows that a batch asks for, as `post_pooled_rows` and `post_table_rows` do.

    Args:
        tables: float32 weights of the tables, (rows, dim) each; unpooled ones of one dim.
        ids: (sum of lengths,) int64, those of the tables one behind the other.
        lengths: (tables x samples,) int64.
        pooled: whether the rows of a bag are added up.

    Attributes:
        out: (samples, sum of dims) or (ids, dim) float32, what was read last.
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], ids: Integers, lengths: Integers, pooled: bool
    ) -> None:
        self._weights = tables  # whose memory `_tables` names
        self._tables = _native.Tables(
            [(table.data_ptr(), len(table), table.shape[1] * 4, False) for table in tables]
        )
        self._ids = _arrived(torch.from_numpy(ids), torch.from_numpy(lengths), len(tables))
        samples = len(lengths) // len(tables)
        dims = [table.shape[1] for table in tables]
        results = (samples, sum(dims)) if pooled else (len(ids), dims[0])
        self.out = torch.ones(results)  # memory that was never written is not there yet
        self._row_bytes = None if pooled else 4 * dims[0]

    def read(self) -> None:
        """Writes the batch's rows or sums to memory as large as slots for them."""
        to = self.out.data_ptr()
        if self._row_bytes is None:
            _native.sum_rows(self._tables, self._ids, to)
        else:
            _native.copy_table_rows(self._tables, self._ids, self._row_bytes, to)


def _arrived(ids: torch.Tensor, lengths: torch.Tensor, features: int) -> _native.BatchIds:
    """Returns ids that this process has sent itself."""
    slot_bytes = SMALLEST_SLOT_BYTES + wanted_slot_bytes(ids.nbytes + lengths.nbytes)
    transport = _native.ShmTransport(0, 1, 2, slot_bytes)
    transport.connect([transport.address])
    transport.seal()
    channel = _native.Channel(transport, 0, 1, 0, 2, _DEADLINE_S, "calibration", 1)
    sent, of_ids = ((tensor.data_ptr(), tensor.element_size()) for tensor in (lengths, ids))
    samples = len(lengths) // features
    layout = (features, samples, len(ids), [features], list[int]())
    _native.post_ids(channel, sent, of_ids, (0, 0), *layout, _NOBODY_WAITS)
    arrival = channel.wait()
    batch = _native.BatchIds(arrival, features, [0])
    channel.release(arrival.sequence, {})
    channel.close()
    return batch
