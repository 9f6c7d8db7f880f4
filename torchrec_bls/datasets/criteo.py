"""Reading the rows of Criteo's Display Advertising Challenge as TorchRec batches."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
from torchrec.datasets.utils import Batch

from torchrec_bls.datasets.batch import make_batch
from torchrec_bls.datasets.criteo_fields import KAGGLE_COLUMNS, Layout, Lines, ParsedRows
from torchrec_bls.datasets.criteo_shape import CATEGORICAL_FEATURES, check_rows_per_table

CHUNK_BYTES = 4 << 20
LONGEST_LINE = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"
WHAT_TO_PASS = (
    "the challenge's train.txt (tab-separated, no header) or a comma-separated file with the "
    "header [Id,]Label,I1..I13,C1..C26, plain or gzipped"
)


class CriteoDataset:
    """One rank's batches of a Criteo file, streamed in the file's order.

    The rows are dealt out in blocks. Each global batch is ``batch_size * world_size`` consecutive
    rows of the file. Rank r gets its r-th contiguous block, as the data-parallel part of a DLRM
    does. The rest at the end of the file is dealt out as evenly as possible: one rank reads each
    row, once. All ranks get the same number of batches. The last one may be smaller, or empty if
    fewer rows than ranks are left.

    Integers become ``log(max(x, 0) + 1)``, the transform of facebookresearch/dlrm
    (``data_utils.py``: negatives to 0; ``_transform_features``: the logarithm). So a missing
    integer is 0. Categories are 32-bit hashes in the file, taken modulo the table's rows, as by
    ``torchrec.datasets.criteo`` and dlrm's ``max_ind_range``. A missing category is row 0.

    A pass holds the text of one global batch and 4 MiB more, and parses only the rank's own rows.
    So only the rank that reads a malformed field reports it. All ranks report a wrong number of
    columns.

    Args:
        path: path of a file; its content shows the format.
        rows_per_table: rows of the 26 tables.
        batch_size: rows of a rank's batch.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an argument is bad, the file has neither format, or a row is malformed (the text
            has file, line, column, the text found and what was expected). Rows are read while
            iterating.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rows_per_table: Sequence[int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_rows_per_table(list(rows_per_table))
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is needed")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self._path = Path(path)
        self._rows_per_table = np.asarray(rows_per_table, dtype=np.int64)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._layout = _find_layout(self._path)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rank's batches, from the start of the file."""
        global_batch = self._batch_size * self._world_size
        pending: list[Lines] = []
        held = 0
        for lines in _read_lines(self._path, self._layout):
            pending.append(lines)
            held += len(lines)
            while held >= global_batch:
                yield self._batch(pending, global_batch)
                pending = _drop(pending, global_batch)
                held -= global_batch
        if held:
            yield self._batch(pending, held)

    def _batch(self, pending: list[Lines], rows: int) -> Batch:
        share, rest = divmod(rows, self._world_size)
        begin = self._rank * share + min(self._rank, rest)
        end = begin + share + (self._rank < rest)
        parsed = [piece.parse() for piece in _cut(pending, begin, end)]
        return self._to_batch(parsed)

    def _to_batch(self, parsed: list[ParsedRows]) -> Batch:
        labels = np.concatenate([piece.labels for piece in parsed])
        integers = np.concatenate([piece.integers for piece in parsed])
        categories = np.concatenate([piece.categories for piece in parsed])
        return make_batch(
            labels,
            _transform_integers(integers),
            (categories % self._rows_per_table).T.reshape(-1),
            np.ones((CATEGORICAL_FEATURES, len(labels)), dtype=np.int32),
        )


def _transform_integers(integers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return np.log1p(np.maximum(integers, 0).astype(np.float32))


def _cut(pieces: list[Lines], begin: int, end: int) -> list[Lines]:
    """Returns the lines [begin, end) of the joined pieces; at least one piece, maybe empty."""
    taken: list[Lines] = []
    offset = 0
    for piece in pieces:
        low, high = max(begin - offset, 0), min(end - offset, len(piece))
        if low < high or not taken:
            taken.append(piece.rows(low, max(low, high)))
        offset += len(piece)
    return taken


def _drop(pieces: list[Lines], rows: int) -> list[Lines]:
    """Returns the pieces without their first lines, and frees blocks that are used up."""
    while pieces and len(pieces[0]) <= rows:
        rows -= len(pieces[0])
        pieces = pieces[1:]
    return [pieces[0].rows(rows, len(pieces[0])), *pieces[1:]] if pieces else []


def _open(path: Path) -> BinaryIO:
    try:
        with path.open("rb") as file:
            compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    except FileNotFoundError:
        raise FileNotFoundError(f"no Criteo file {path}; pass {WHAT_TO_PASS}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a directory; pass {WHAT_TO_PASS}") from None
    return cast(BinaryIO, gzip.open(path, "rb")) if compressed else path.open("rb")


def _read(file: BinaryIO, path: Path, size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: the gzip file is damaged or cut short ({error})") from error


def _find_layout(path: Path) -> Layout:
    with _open(path) as file:
        line = _read(file, path, LONGEST_LINE).split(b"\n", 1)[0].rstrip(b"\r")
    if not line:
        raise ValueError(f"{path}, line 1: empty, expected a row; pass {WHAT_TO_PASS}")
    if line.count(b"\t"):
        return Layout(str(path), ord("\t"), has_header=False, has_id=False)
    header = line.decode("utf-8", "backslashreplace").split(",")
    for has_id in (False, True):
        layout = Layout(str(path), ord(","), has_header=True, has_id=has_id)
        if header == layout.columns:
            return layout
    expected = ["Id", *KAGGLE_COLUMNS] if header[0] == "Id" else KAGGLE_COLUMNS
    column, found = next(
        (
            (column, found)
            for column, found in zip(expected, header, strict=False)
            if column != found
        ),
        (f"{len(expected)} columns", f"{len(header)} columns"),
    )
    raise ValueError(
        f"{path}, line 1: no tab and no Criteo header: expected {column}, found {found[:40]!r}; "
        f"pass {WHAT_TO_PASS}"
    )


def _read_lines(path: Path, layout: Layout) -> Iterator[Lines]:
    """Yields the file's rows in blocks of whole lines, about 4 MiB each."""
    number = 1
    rest = b""
    with _open(path) as file:
        if layout.has_header:
            number += 1
            file.readline()
        while text := _read(file, path, CHUNK_BYTES):
            rest += text
            end = rest.rfind(b"\n") + 1
            if end:
                lines = Lines.locate(np.frombuffer(rest, np.uint8, end), layout, number)
                number += len(lines)
                rest = rest[end:]
                yield lines
            if len(rest) > LONGEST_LINE:
                raise ValueError(
                    f"{path}, line {number}: longer than {LONGEST_LINE} bytes, "
                    f"expected {len(layout.columns)} columns"
                )
    if rest:
        yield Lines.locate(np.frombuffer(rest + b"\n", np.uint8), layout, number)
    elif number == 1 + layout.has_header:
        raise ValueError(f"{path} has no rows; pass {WHAT_TO_PASS}")
