"""The effects of a codec on embeddings between ranks: their bytes, and the work at both ends."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ...problem.plan_groups import PlanGroup
from ...problem.shard_traffic import EMBEDDING_BYTES

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CodecCosts:
    """The costs of a codec of rows (docs/design/codecs.md) that a step depends on.

    Attributes:
        name: name of the codec.
        bytes_per_value: bytes of a value on the wire.
        row_overhead_bytes: bytes of a row beside its values: scale and least value.
        encode_us_per_value: time to encode a value, on one thread with a core of its own.
        decode_us_per_value: time to decode a value, on one thread with a core of its own.
    """

    name: str
    bytes_per_value: float
    row_overhead_bytes: float = 0.0
    encode_us_per_value: float = 0.0
    decode_us_per_value: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for impossible numbers."""
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(
                    f"codec '{self.name}': {field.name} is {value}, but must not be negative"
                )

    def row_bytes(self, group: PlanGroup) -> Floats:
        """Returns (ranks,), bytes of a group's embeddings by each rank, for each rank."""
        values = group.rows / EMBEDDING_BYTES
        encoded: Floats = values * self.bytes_per_value + group.results * self.row_overhead_bytes
        return encoded

    def encode_us(self, group: PlanGroup) -> Floats:
        """Returns (ranks,), time of each rank to encode a step's rows for all ranks, itself
        included."""
        values = group.rows / EMBEDDING_BYTES * group.job.ranks
        return values * self.encode_us_per_value

    def decode_us(self, group: PlanGroup) -> float:
        """Returns the time of a rank to decode a step's rows from all ranks, the same on each."""
        return float(group.rows.sum()) / EMBEDDING_BYTES * self.decode_us_per_value


#: Rows as they are, which pass no codec.
FP32 = CodecCosts("fp32", EMBEDDING_BYTES)
