"""The bytes and speeds of codecs of rows, measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchrec_bls import _native
from torchrec_bls.analysis.compression_speeds import seconds_of
from torchrec_bls.codecs.rows import Codec

_VALUES = 1 << 18
_US = 1e6  # in a second


class CodecSpeed(NamedTuple):
    """A codec of rows.

    Attributes:
        bytes_per_value: bytes of a value in a message.
        row_overhead_bytes: bytes of each row beside its values.
        encode_us_per_value: time to encode a value in a frame, on one thread.
        decode_us_per_value: time to decode a value from a frame, on one thread.
    """

    bytes_per_value: float
    row_overhead_bytes: float
    encode_us_per_value: float
    decode_us_per_value: float


def codecs_named(names: Sequence[str]) -> list[Codec]:
    """Returns the codecs with these names, which are the names of `CodecConfig`.

    Raises:
        ValueError: a name is unknown or given twice.
    """
    codecs = {codec.name.lower(): codec for codec in Codec}
    for name in names:
        if name not in codecs:
            raise ValueError(f"codec '{name}' is none of {', '.join(codecs)}")
    if len(set(names)) < len(names):
        raise ValueError(f"codecs are {', '.join(names)}, and one is there twice")
    return [codecs[name] for name in names]


def measure_codecs(codecs: Sequence[Codec], columns: int) -> dict[Codec, CodecSpeed]:
    """Returns the speeds of each codec on rows of random values. The rows are in a frame, and one
    thread encodes and decodes, as when `analyse-tables` measures stages. Codecs take turns. The
    measurement takes some 0.1 s.

    Args:
        codecs: codecs that encode; FP32 is none.
        columns: columns of the rows.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((max(_VALUES // columns, 1), columns), dtype=np.float32)
    seconds = seconds_of({codec: _Rows(rows, codec) for codec in codecs})
    return {
        codec: CodecSpeed(*_row_format(codec), *(_US * each / rows.size for each in seconds[codec]))
        for codec in codecs
    }


def _row_format(codec: Codec) -> tuple[float, float]:
    """Returns the bytes of a value, and the bytes of a row beside its values."""
    few, many = 64, 128
    of_few, of_many = (_native.usual_encoded_bytes(codec, 1, columns) for columns in (few, many))
    per_value = (of_many - of_few) / (many - few)
    return per_value, of_few - few * per_value


class _Rows:
    """A frame of rows."""

    def __init__(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]], codec: Codec):
        features = _native.CodedFeatures([(codec, rows.shape[1], 0.0, False)])
        self._sent, self._received = (
            _native.Frame.side_by_side(features, torch.from_numpy(each), 0, len(each))
            for each in (rows, np.zeros_like(rows))
        )
        self._out = torch.zeros(_native.encode_frame(self._sent), dtype=torch.uint8)

    def encode(self) -> None:
        _native.encode_frame(self._sent, self._out)

    def decode(self) -> None:
        _native.decode_frame(self._out, self._received)
