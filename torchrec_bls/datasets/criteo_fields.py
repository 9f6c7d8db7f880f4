"""Locating and parsing the fields of a block of Criteo lines, whole columns at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.datasets.criteo_shape import CATEGORICAL_FEATURES, DENSE_FEATURES

NEWLINE, CARRIAGE_RETURN, MINUS, ZERO = 10, 13, 45, 48
LABEL_COLUMN = "Label"
DENSE_COLUMNS = [f"I{number}" for number in range(1, DENSE_FEATURES + 1)]
CATEGORICAL_COLUMNS = [f"C{number}" for number in range(1, CATEGORICAL_FEATURES + 1)]
KAGGLE_COLUMNS = [LABEL_COLUMN, *DENSE_COLUMNS, *CATEGORICAL_COLUMNS]

# Criteo's integers are 32-bit, and its categories 32-bit hashes.
MAX_INTEGER_CHARACTERS = 11
MAX_HEX_DIGITS = 8
NOT_HEX = 255
LONGEST_QUOTE = 40

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def _hex_digits() -> Bytes:
    table = np.full(256, NOT_HEX, dtype=np.uint8)
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        table[list(digits)] = np.arange(16)
    return table


HEX_DIGITS = _hex_digits()


@dataclass(frozen=True)
class Layout:
    """The layout of a file's lines.

    Attributes:
        source: name of the file, for messages.
        separator: byte between fields.
        has_header: whether line 1 names the columns.
        has_id: whether an Id column precedes the label.
    """

    source: str
    separator: int
    has_header: bool
    has_id: bool

    @property
    def columns(self) -> list[str]:
        """Returns the names of the columns, in the file's order."""
        return ["Id", *KAGGLE_COLUMNS] if self.has_id else KAGGLE_COLUMNS


@dataclass(frozen=True)
class ParsedRows:
    """Values of n rows; a missing field is 0 in each of them.

    Attributes:
        labels: (n,) int32, labels of 0 or 1.
        integers: (n, 13) int64, integers of each row.
        categories: (n, 26) int64, values of the hexadecimal hashes.
    """

    labels: npt.NDArray[np.int32]
    integers: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lines:
    """n lines of a block with the positions of their fields.

    Attributes:
        layout: layout of the file.
        block: text of the lines.
        starts: (n,), begin of each line in ``block``.
        ends: (n, columns), end of each field.
        first_number: number of the first line in the file, counted from 1.
    """

    layout: Layout
    block: Bytes
    starts: Positions
    ends: Positions
    first_number: int

    @classmethod
    def locate(cls, block: Bytes, layout: Layout, first_number: int) -> Lines:
        """Finds the fields of a block that ends with a newline.

        Raises:
            ValueError: a line has another number of columns; the text names file and line.
        """
        delimiters = np.flatnonzero((block == layout.separator) | (block == NEWLINE))
        last_of_line = np.flatnonzero(block[delimiters] == NEWLINE)
        columns = np.diff(last_of_line, prepend=-1)
        wrong = np.flatnonzero(columns != len(layout.columns))
        if len(wrong):
            found = int(columns[wrong[0]])
            unlabelled = found == len(layout.columns) - 1
            raise ValueError(
                f"{layout.source}, line {first_number + wrong[0]}: {found} columns, expected "
                f"{len(layout.columns)} ({layout.columns[0]} to {layout.columns[-1]})"
                + (", or is it the test set, without labels?" if unlabelled else "")
            )
        ends = delimiters.reshape(-1, len(layout.columns))
        starts = np.concatenate(([0], ends[:-1, -1] + 1))
        ends[:, -1] -= block[ends[:, -1] - 1] == CARRIAGE_RETURN
        return cls(layout, block, starts, ends, first_number)

    def __len__(self) -> int:
        """Returns the number of lines."""
        return len(self.starts)

    def rows(self, begin: int, end: int) -> Lines:
        """Returns the lines [begin, end), which share the block."""
        return Lines(
            self.layout,
            self.block,
            self.starts[begin:end],
            self.ends[begin:end],
            self.first_number + begin,
        )

    def parse(self) -> ParsedRows:
        """Reads every field but Id.

        Raises:
            ValueError: a field is malformed. The text has file, line, column, the text found and
                what was expected, for the first such field in the file's order.
        """
        columns = len(self.layout.columns)
        field_starts = np.empty((len(self), columns), dtype=np.int64)
        field_starts[:, 0] = self.starts
        field_starts[:, 1:] = self.ends[:, :-1] + 1
        label = int(self.layout.has_id)
        dense, categorical = label + 1, label + 1 + DENSE_FEATURES
        wrong = np.zeros((len(self), columns), dtype=np.bool_)
        labels, wrong[:, label] = _parse_labels(
            self.block, field_starts[:, label], self.ends[:, label]
        )
        integers, wrong[:, dense:categorical] = _parse_integers(
            self.block, field_starts[:, dense:categorical], self.ends[:, dense:categorical]
        )
        categories, wrong[:, categorical:] = _parse_hexadecimals(
            self.block, field_starts[:, categorical:], self.ends[:, categorical:]
        )
        if wrong.any():
            row, column = np.unravel_index(np.argmax(wrong), wrong.shape)
            begin, end = field_starts[row, column], self.ends[row, column]
            raise self._malformed(int(row), int(column), self.block[begin:end].tobytes())
        return ParsedRows(labels, integers, categories)

    def _malformed(self, row: int, column: int, text: bytes) -> ValueError:
        name = self.layout.columns[column]
        if name == LABEL_COLUMN:
            expected = "0 or 1"
        elif name in DENSE_COLUMNS:
            expected = "an integer of 32 bits or nothing"
        else:
            expected = f"1 to {MAX_HEX_DIGITS} hexadecimal digits or nothing"
        quote = text[:LONGEST_QUOTE].decode("utf-8", "backslashreplace")
        return ValueError(
            f"{self.layout.source}, line {self.first_number + row}, column {name}: "
            f"{quote!r}{' (cut)' if len(text) > LONGEST_QUOTE else ''}, expected {expected}"
        )


def _parse_labels(
    block: Bytes, starts: Positions, ends: Positions
) -> tuple[npt.NDArray[np.int32], Mask]:
    digits = block[starts].astype(np.int32) - ZERO
    wrong = (ends - starts != 1) | (digits < 0) | (digits > 1)
    return digits, wrong


def _parse_integers(
    block: Bytes, starts: Positions, ends: Positions
) -> tuple[npt.NDArray[np.int64], Mask]:
    lengths = ends - starts
    wrong = lengths > MAX_INTEGER_CHARACTERS
    negative = (block[starts] == MINUS) & (lengths > 1)
    values = np.zeros(starts.shape, dtype=np.int64)
    for position in range(min(int(lengths.max(initial=0)), MAX_INTEGER_CHARACTERS)):
        inside = position < lengths
        if position == 0:
            inside &= ~negative
        digits = block[np.where(inside, starts + position, 0)].astype(np.int64) - ZERO
        wrong |= inside & ((digits < 0) | (digits > 9))
        values = np.where(inside, values * 10 + digits, values)
    values = np.where(negative, -values, values)
    limits = np.iinfo(np.int32)
    wrong |= (values < limits.min) | (values > limits.max)
    return values, wrong


def _parse_hexadecimals(
    block: Bytes, starts: Positions, ends: Positions
) -> tuple[npt.NDArray[np.int64], Mask]:
    lengths = ends - starts
    wrong = lengths > MAX_HEX_DIGITS
    values = np.zeros(starts.shape, dtype=np.int64)
    for position in range(min(int(lengths.max(initial=0)), MAX_HEX_DIGITS)):
        inside = position < lengths
        digits = HEX_DIGITS[block[np.where(inside, starts + position, 0)]]
        wrong |= inside & (digits == NOT_HEX)
        values = np.where(inside, (values << 4) | digits, values)
    return values, wrong
