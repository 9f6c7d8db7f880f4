"""Measures the costs of codecs of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchrec_bls import _native
from torchrec_bls.analysis.compression_speeds import seconds_of
from torchrec_bls.codecs.rows import Codec

from ..simulation.wire.codecs import FP32, CodecCosts

_VALUES = 1 << 18
_US = 1e6  # in a second


def measure_codecs(names: Sequence[str], columns: int) -> list[CodecCosts]:
    """Returns the costs of codecs on rows of random values. The rows are in a frame, and one thread
    encodes and decodes, as when `analyse-tables` measures stages. Codecs take turns. The
    measurement takes some 0.1 s.

    Args:
        names: names of codecs, as of `CodecConfig`. Float32, which encodes nothing, costs nothing.
        columns: columns of the rows.

    Raises:
        ValueError: a name is unknown or given twice.
    """
    codecs = _codecs_named(names)
    random = np.random.default_rng(0)
    rows = random.standard_normal((max(_VALUES // columns, 1), columns), dtype=np.float32)
    seconds = seconds_of({each: _Rows(rows, each) for each in codecs if each is not Codec.FP32})
    return [
        CodecCosts(name, *_row_format(codec), *(_US * each / rows.size for each in seconds[codec]))
        if codec in seconds
        else FP32
        for name, codec in zip(names, codecs, strict=True)
    ]


def _codecs_named(names: Sequence[str]) -> list[Codec]:
    codecs = {codec.name.lower(): codec for codec in Codec}
    for name in names:
        if name not in codecs:
            raise ValueError(f"codec '{name}' is none of {', '.join(codecs)}")
    if len(set(names)) < len(names):
        raise ValueError(f"codecs are {', '.join(names)}, and one is there twice")
    return [codecs[name] for name in names]


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
