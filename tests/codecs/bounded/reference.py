"""Error-bounded rows in numpy and texts of bits, step by step as docs/wire-format.md says."""

import functools
import heapq
import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Code = dict[int, int]  # the length of each symbol's code

LONGEST, ABSENT = 11, 12
AS_THEY_ARE, ALL_NEW = 255, 16
LENGTHS_FOLLOW, STANDARD = 9, 16


def scale_of(bound: float, bits: int) -> np.float32:
    exact = 2 * Fraction(float(np.float32(bound))) * (1 - Fraction(2) ** (bits - 23))
    unit = Fraction(1)
    while exact / unit >= 2 ** (24 - bits):
        unit *= 2
    while exact / unit < 2 ** (23 - bits):
        unit /= 2
    return np.float32(float(exact // unit * unit))


def packed(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return int(bits or "0", 2).to_bytes(len(bits) // 8, "big")


def in_binary(number: int, width: int) -> str:
    return f"{number:0{width}b}" if width else ""


# Codes


def best_code(counts: dict[int, int]) -> Code:
    """Package-merge, with the symbols of each package themselves."""
    symbols = [
        (counts[symbol], (symbol,)) for symbol in sorted(counts, key=lambda s: (counts[s], s))
    ]
    level: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(LONGEST):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = list(heapq.merge(symbols, pairs, key=lambda item: item[0]))
    return dict(Counter(s for _, package in level[: 2 * len(symbols) - 2] for s in package))


def good_code(counts: dict[int, int]) -> Code:
    """Huffman's, of two queues of symbols and pairs, symbols first, with a few shortened."""
    symbols = sorted(counts, key=lambda s: (counts[s], s))
    queue = [(counts[symbol], [0]) for symbol in symbols]
    pairs: list[tuple[int, list[int]]] = []
    while len(queue) + len(pairs) > 1:
        taken = [
            (queue if queue and (not pairs or queue[0][0] <= pairs[0][0]) else pairs).pop(0)
            for _ in range(2)
        ]
        depths = [depth + 1 for _, of_one in taken for depth in of_one]
        pairs.append((taken[0][0] + taken[1][0], depths))
    lengths = Counter(min(depth, LONGEST) for depth in pairs[0][1])
    share = sum(number << LONGEST - length for length, number in lengths.items())
    for _ in range(share - 2**LONGEST):
        shorter = max(length for length in range(LONGEST) if lengths[length])
        lengths.update({shorter: -1, LONGEST: -1})
        lengths[shorter + 1] += 2
    code = dict(zip(symbols, sorted(lengths.elements(), reverse=True), strict=True))
    huffman = dict(zip(symbols, sorted(pairs[0][1], reverse=True), strict=True))
    bits, least = (sum(counts[s] * of[s] for s in symbols) for of in (code, huffman))
    return code if bits <= least + least // 128 else best_code(counts)


def codewords(code: Code) -> dict[int, str]:
    words, at = {}, Fraction(0)
    for symbol in sorted(code, key=lambda s: (code[s], s)):
        words[symbol] = in_binary(int(at * 2 ** code[symbol]), code[symbol])
        at += Fraction(1, 2 ** code[symbol])
    return words


def fixed_width(first: int, width: int) -> Code:
    return dict.fromkeys(range(first, first + 2**width), width)


@functools.cache
def standard_code(number: int) -> Code:
    gauss, index = number >= 24, number % 24 * (2 if number >= 24 else 1)
    step = [581260615, 799036310, 1044178423, 1307656790][index % 4]
    for _ in range(index // 4):
        step = isqrt(step << 32)
    change = (step * step >> 32) if gauss else None
    weights, weight = {}, 2**30
    for distance in range(128):
        if weight < 2**17:
            break
        weights[distance] = weights[-distance] = weight
        weight = weight * step >> 32
        if change is not None:
            step = step * change >> 32
    return best_code(weights)


def lengths_text(code: Code) -> str:
    text, before = "", LONGEST
    for symbol in range(min(code), max(code) + 1):
        length = code.get(symbol, ABSENT)
        change = length - before
        text += "0" * (2 * change if change >= 0 else -2 * change - 1) + "1"
        before = length
    return text


def chosen_code(symbols: Sequence[int]) -> tuple[bytes, Code]:
    counts = dict(Counter(symbols))
    first, last = min(counts), max(counts)
    width = (last - first).bit_length()
    base = min(first, 128 - 2**width)
    plain = fixed_width(base, width)
    options = [(16 + len(symbols) * width, struct.pack("Bb", width, base), plain)]

    def add(description: bytes, code: Code) -> None:
        bits = sum(counts[symbol] * code[symbol] for symbol in counts)
        options.append((8 * len(description) + bits, description, code))

    if width > 0:
        own = good_code(counts)
        add(struct.pack("Bbb", LENGTHS_FOLLOW, first, last) + packed(lengths_text(own)), own)
        for number in range(48 if len(symbols) <= 8192 else 0):
            if counts.keys() <= standard_code(number).keys():
                add(bytes([STANDARD + number]), standard_code(number))
    return min(options, key=lambda option: option[0])[1:]


def symbols_of_stream(count: int) -> int:
    streams = 1 if count < 1024 else 4 if count < 8192 else 6
    return -(-count // streams)


def write_symbols(symbols: Sequence[int]) -> bytes:
    if not symbols:
        return b""
    description, code = chosen_code(symbols)
    if description[0] == 0:
        return description
    words = codewords(code)
    each = symbols_of_stream(len(symbols))
    streams = [
        packed("".join(words[s] for s in symbols[at : at + each]))
        for at in range(0, len(symbols), each)
    ]
    sizes = [len(stream) for stream in streams[:-1]]
    changes = [size - before for before, size in itertools.pairwise([0, *sizes])]
    return description + b"".join([*map(leb128, map(zigzag, changes)), *streams])


def zigzag(change: int) -> int:
    return 2 * change if change >= 0 else -2 * change - 1


def leb128(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 | 128]) + leb128(number // 128)


# Rows


def encode(rows: Floats, bound: float, groups: Sequence[int] | None = None) -> bytes:
    """Returns the bytes of a matrix."""
    if groups is not None:
        rows = rows[[groups.index(group) for group in range(max(groups, default=-1) + 1)]]
    if rows.size == 0:
        return b""
    # As many rows as this may be escaped before codes have 16 bits.
    most = len(rows) // 64
    codes, escaped, low_bits = *quantized(rows, bound, 8), 0
    if escaped.sum() > most:
        wide, wide_escaped = quantized(rows, bound, 16)
        if escaped.sum() - wide_escaped.sum() > most:
            codes, escaped, low_bits = wide, wide_escaped, 1
    kinds: list[int] = []
    numbers, new = "", []
    found: dict[bytes, int] = {}
    for row, is_escaped in zip(codes, escaped, strict=True):
        if is_escaped or not row.any():
            kinds.append(-2 if is_escaped else -1)
            continue
        number = (
            found.setdefault(row.tobytes(), len(new))
            if groups is None and len(row) >= 8
            else len(new)
        )
        if number == len(new):
            kinds.append(0)
            new.append(row)
        else:
            kinds.append(1 + number.bit_length())
            numbers += in_binary(number, number.bit_length())[1:]
    values = np.concatenate(new).astype(int).tolist() if new else []
    if low_bits:
        low_bits = max([1] + [(v if v >= 0 else ~v).bit_length() - 7 for v in values])
    all_new = not any(kinds)
    data = bytes([low_bits + ALL_NEW * all_new])
    data += b"" if all_new else write_symbols(kinds) + packed(numbers)
    data += write_symbols([value >> low_bits for value in values])
    data += packed("".join(in_binary(value % 2**low_bits, low_bits) for value in values))
    data += rows[escaped].tobytes()
    raw = bytes([AS_THEY_ARE]) + rows.tobytes()
    return data if len(data) < len(raw) else raw


def quantized(
    rows: Floats, bound: float, bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns the codes, and which rows are escaped."""
    scale = scale_of(bound, bits)
    limit = np.float32(2 ** (bits - 1) - 1) * scale
    escaped = ~(np.abs(rows) <= limit).all(axis=1)
    inverse = np.float32(1) / scale
    valid = np.where(escaped[:, None], np.float32(0), rows)
    return np.rint(valid * inverse).astype(np.int64), escaped


class Reader:
    """Takes bytes, and bits of them, from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def bits(self) -> "Bits":
        return Bits(self)

    def symbols(self, count: int) -> list[int]:
        if count == 0:
            return []
        kind = self.take(1)[0]
        if kind >= STANDARD:
            code = standard_code(kind - STANDARD)
        elif kind == LENGTHS_FOLLOW:
            code = self.lengths(*struct.unpack("bb", self.take(2)))
        else:
            (first,) = struct.unpack("b", self.take(1))
            if kind == 0:
                return [first] * count
            code = fixed_width(first, kind)
        assert sum(Fraction(1, 2**length) for length in code.values()) == 1
        symbol_of = {word: symbol for symbol, word in codewords(code).items()}
        each = symbols_of_stream(count)
        changes = [self.change() for _ in range(each, count, each)]
        sizes = list(itertools.accumulate(changes))
        symbols: list[int] = []
        for index, first in enumerate(range(0, count, each)):
            begin, bits = self.at, self.bits()
            for _ in range(first, min(first + each, count)):
                word = ""
                while word not in symbol_of:
                    word += bits.take(1)
                symbols.append(symbol_of[word])
            bits.finish()
            assert index == len(sizes) or self.at - begin == sizes[index]
        return symbols

    def lengths(self, first: int, last: int) -> Code:
        bits, length, code = self.bits(), LONGEST, {}
        for symbol in range(first, last + 1):
            number = 0
            while bits.take(1) == "0":
                number += 1
            length += number // 2 if number % 2 == 0 else -(number // 2 + 1)
            if length != ABSENT:
                code[symbol] = length
        bits.finish()
        return code

    def change(self) -> int:
        number = self.number()
        return -(number // 2 + 1) if number % 2 else number // 2

    def number(self) -> int:
        byte = self.take(1)[0]
        return byte if byte < 128 else byte % 128 + 128 * self.number()


class Bits:
    def __init__(self, reader: Reader) -> None:
        self.reader, self.text = reader, ""

    def take(self, count: int) -> str:
        while len(self.text) < count:
            self.text += in_binary(self.reader.take(1)[0], 8)
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def finish(self) -> None:
        assert "1" not in self.text


def decode(
    data: bytes, shape: tuple[int, int], bound: float, groups: Sequence[int] | None = None
) -> Floats:
    """Returns the matrix of `shape` in `data`, which is taken to be whole."""
    columns = shape[1]
    count = shape[0] if groups is None else max(groups, default=-1) + 1
    rows = np.zeros((count, columns), np.float32)
    reader = Reader(data)
    if rows.size:
        low_bits = reader.take(1)[0]
        if low_bits == AS_THEY_ARE:
            rows[:] = np.frombuffer(reader.take(rows.nbytes), np.float32).reshape(rows.shape)
        else:
            _decode_rows(reader, rows, low_bits, bound)
    assert reader.at == len(data)
    return rows if groups is None else rows[list(groups)]


def _decode_rows(reader: Reader, rows: Floats, low_bits: int, bound: float) -> None:
    all_new, low_bits = low_bits >= ALL_NEW, low_bits % ALL_NEW
    kinds = [0] * len(rows) if all_new else reader.symbols(len(rows))
    numbers = reader.bits()
    sources = []
    for kind in kinds:
        width = kind - 1
        sources.append(int("1" + numbers.take(width - 1), 2) if width > 0 else 0)
    numbers.finish()
    columns = rows.shape[1]
    high = reader.symbols(kinds.count(0) * columns)
    low = reader.bits()
    codes = [value << low_bits | int(low.take(low_bits) or "0", 2) for value in high]
    low.finish()
    scale = scale_of(bound, 16 if low_bits else 8)
    new: list[Floats] = []
    for index, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        if kind == 0:
            at = len(new) * columns
            new.append(np.array(codes[at : at + columns], np.float32) * scale)
        if kind >= 0:
            rows[index] = new[-1] if kind == 0 else new[source]
        elif kind == -2:
            rows[index] = 0
    for index, kind in enumerate(kinds):
        if kind == -2:
            rows[index] = np.frombuffer(reader.take(4 * columns), np.float32)
