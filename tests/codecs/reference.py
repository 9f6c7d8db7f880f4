"""Row-wise quantization in numpy, step by step as docs/wire-format.md says."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SMALLEST_SCALE = np.float32(2.0**-126)
END_OF_VALUES = np.float32(2.0**127)
LARGEST_RANGE = np.float32(2.0**126)


def encode(rows: Floats, bits: int) -> bytes:
    """Returns the bytes of a matrix."""
    heads, escaped = [], []
    for row in rows:
        with np.errstate(all="ignore"):
            width = (
                row.max() - row.min() if (abs(row) < END_OF_VALUES).all() else np.float32(np.inf)
            )
        if not width < LARGEST_RANGE:
            heads.append(
                np.array([np.nan, 0], np.float32).tobytes() + bytes(-(-len(row) * bits // 8))
            )
            escaped.append(row.tobytes())
            continue
        heads.append(_encode_row(row, width, bits))
    return b"".join(heads + escaped)


def _encode_row(row: Floats, width: np.float32, bits: int) -> bytes:
    steps = np.float32(2**bits - 1)
    least = row.min() + np.float32(0)
    scale, inverse = np.float32(0), np.float32(0)
    if width > 0:
        scale = _rounded(width / steps, 24 - bits)
        with np.errstate(over="ignore"):
            inverse = steps / width
        if scale < SMALLEST_SCALE:
            scale, inverse = SMALLEST_SCALE, 1 / SMALLEST_SCALE
    codes = np.rint((row - least) * inverse).astype(np.uint8)
    each = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :bits]
    packed = np.packbits(each.reshape(-1), bitorder="little")
    return np.array([scale, least], np.float32).tobytes() + packed.tobytes()


def _rounded(value: np.float32, significant: int) -> np.float32:
    """Rounds to so many significant bits, halfway cases up."""
    fraction, exponent = np.frexp(np.float64(value))
    return np.float32(
        np.ldexp(np.floor(np.ldexp(fraction, significant) + 0.5), exponent - significant)
    )


def decode(data: bytes, shape: tuple[int, int], bits: int) -> Floats:
    """Returns the matrix of `shape` in `data`, which is taken to be whole."""
    rows, columns = shape
    code_bytes = -(-columns * bits // 8)
    escaped = rows * (8 + code_bytes)
    out = np.empty(shape, np.float32)
    for index in range(rows):
        at = index * (8 + code_bytes)
        scale, least = np.frombuffer(data, np.float32, 2, at)
        if np.isnan(scale):
            out[index] = np.frombuffer(data, np.float32, columns, escaped)
            escaped += 4 * columns
            continue
        each = np.unpackbits(np.frombuffer(data, np.uint8, code_bytes, at + 8), bitorder="little")[
            : columns * bits
        ].reshape(columns, bits)
        codes = each.astype(np.uint8) @ (1 << np.arange(bits, dtype=np.uint8))
        out[index] = codes.astype(np.float32) * scale + least
    return out
