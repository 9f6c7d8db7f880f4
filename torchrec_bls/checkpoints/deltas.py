"""Deltas: the rows and dense weights in which a version differs from the one before.

A delta is a folder `NAME.delta` with one file of safetensors of each rank that has trained. Its
tensors are, for each table with new rows:

    ids/TABLE             int64 [rows], numbers of rows in the table, in ascending order
    rows/TABLE/COLUMN     [rows, columns], of the columns from COLUMN on; one of each shard

and for each dense weight, in the file of rank 0 alone:

    dense/WEIGHT

TABLE and WEIGHT are names in the model's state dict. `Head` is in the metadata, as "delta".
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, NamedTuple

import msgspec
import torch

from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.rows import Rows
from torchrec_bls.checkpoints.safetensors import SafetensorsFile, read_file, write_file
from torchrec_bls.records import Amount, Format, Positive, Record, Whole, decode

#: How the name of a delta ends.
DELTA_SUFFIX = ".delta"
_FILES = ".safetensors"
_IDS, _ROWS, _DENSE = "ids/", "rows/", "dense/"
_HEAD = "delta"
# As `publish_rows` takes it.
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_CURE = "write the delta again with DeltaWriter, or go on with a checkpoint"


class Head(Record):
    """What a file of a delta says of itself.

    Attributes:
        name: version that the delta makes.
        base: version that it is to be applied to.
        rank: rank that has written the file.
        ranks: number of ranks, each of which has written one.
        trained: when the rank's rows were as they are here, in seconds since 1970.
        format: see Format.
        version: version of the format.
    """

    name: _Name
    base: _Name
    rank: Whole
    ranks: Positive
    trained: Amount
    format: str = "torchrec_bls delta"
    version: int = 1


_HEADS = Format(Head, _CURE, name="torchrec_bls delta", versions=(1,))


class TablePart(NamedTuple):
    """New rows of a table that one rank has.

    Attributes:
        ids: numbers of the rows in the table, int64 [rows], each once, in ascending order.
        columns: values of each shard, [rows, columns], by its first column.
    """

    ids: torch.Tensor
    columns: Mapping[int, torch.Tensor]


def write_part(
    folder: Path,
    head: Head,
    tables: Mapping[str, TablePart],
    dense: Mapping[str, torch.Tensor],
) -> None:
    """Writes a rank's file of a delta into a folder, and returns when the disk has it.

    Args:
        folder: folder of the delta. Its name begins with a dot as long as files are missing.
        head: what the file says of itself.
        tables: new rows by the tables' names in the model's state dict.
        dense: dense weights by name; none but of rank 0.

    Raises:
        ValueError: a dense weight is of a dtype that no such file can have.
        OSError: the file can't be written. A part of it may be there.
    """
    tensors = {}
    for name, part in tables.items():
        tensors[f"{_IDS}{name}"] = part.ids
        for column, rows in part.columns.items():
            tensors[f"{_ROWS}{name}/{column}"] = rows
    for name, value in dense.items():
        tensors[f"{_DENSE}{name}"] = value
    metadata = {_HEAD: msgspec.json.encode(head).decode()}
    write_file(folder / f"rank-{head.rank}-of-{head.ranks}{_FILES}", tensors, metadata)


class _StoredPart(NamedTuple):
    """New rows of a table in a file: ids, and values by first column."""

    ids: Rows
    columns: dict[int, Rows]


class Delta:
    """A delta whose files are all there. Its tensors are read when they are asked for.

    A context manager. Closing it closes its files.

    Args:
        path: its folder.

    Attributes:
        path: its folder.
        version: version that it makes.
        base: version that it is to be applied to.
        trained: when the rows of the first rank were as they are here, in seconds since 1970 by
            the clocks of the training's hosts.
        identity: digest of names, inodes, sizes and times of its files.

    Raises:
        ValueError: there is no delta, or it is incomplete, or damaged; the text names the file and
            the cure.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = files = Files(path)
        try:
            names = sorted(each.name for each in path.iterdir())
        except OSError as error:
            raise ValueError(f"{path} can't be read ({error}): {_CURE}") from error
        found = [path / each for each in names if each.endswith(_FILES) and each[0] != "."]
        if not found:
            raise ValueError(f"{path} has no {_FILES} file: it is still written, or no delta")
        opened = [(file, read_file(file, path, files)) for file in found]
        heads = [_head_of(file, of) for file, of in opened]
        self.version, self.base = heads[0].name, heads[0].base
        self.trained = min(head.trained for head in heads)
        _check_are_all(path, heads)
        self._tables: dict[str, list[_StoredPart]] = defaultdict(list)
        self._dense: dict[str, Rows] = {}
        for (file, of), head in zip(opened, heads, strict=True):
            self._sort(file, head, of)
        self.identity = files.identity()

    def __enter__(self) -> "Delta":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def rows(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the new rows of all ranks, as `publish_rows` takes them: ids, int64 [rows], and
        whole rows, [rows, columns], by the tables' names in the model's state dict.

        Raises:
            ValueError: files have changed since, or can't be read; ids are not in ascending order,
                or come twice; or the shards of a table have no whole rows.
        """
        return {
            name: _joined(f"'{name}' of {self.path}", parts) for name, parts in self._tables.items()
        }

    def dense(self) -> dict[str, torch.Tensor]:
        """Returns the dense weights by their names in the model's state dict.

        Raises:
            ValueError: files have changed since, or can't be read.
        """
        return {name: each.whole() for name, each in self._dense.items()}

    def _sort(self, file: Path, head: Head, of: SafetensorsFile) -> None:
        """Takes the tensors of a file over by their names."""
        tables: dict[str, dict[int, Rows]] = defaultdict(dict)
        ids: dict[str, Rows] = {}
        for key, entry in of.entries.items():
            if isinstance(entry, str):
                raise ValueError(entry)
            if key.startswith(_DENSE) and head.rank == 0:
                self._dense[key.removeprefix(_DENSE)] = entry
            elif key.startswith(_IDS):
                ids[key.removeprefix(_IDS)] = entry
            elif key.startswith(_ROWS) and (place := _column_of(key)) is not None:
                tables[place[0]][place[1]] = entry
            else:
                raise ValueError(f"{file} has the tensor {key!r}, which no delta has: {_CURE}")
        if ids.keys() != tables.keys():
            alone = sorted(ids.keys() ^ tables.keys())
            raise ValueError(f"{file} has ids without rows of {alone}, or the reverse: {_CURE}")
        for name, numbers in ids.items():
            if numbers.dtype != torch.int64 or len(numbers.shape) != 1:
                raise ValueError(
                    f"{file} has ids of '{name}' that are {numbers.dtype} {list(numbers.shape)}, "
                    f"but must be int64, [rows]: {_CURE}"
                )
            for rows in tables[name].values():
                if len(rows.shape) != 2 or rows.shape[0] != numbers.shape[0]:
                    raise ValueError(
                        f"{file} has rows of '{name}' of the shape {list(rows.shape)} for "
                        f"{numbers.shape[0]} ids: {_CURE}"
                    )
            self._tables[name].append(_StoredPart(numbers, tables[name]))


def _head_of(file: Path, of: SafetensorsFile) -> Head:
    text = b"{}" if of.metadata is None else of.metadata
    metadata = decode(text, dict[str, str], f"{file}: the metadata", _CURE)
    if _HEAD not in metadata:
        raise ValueError(f"{file} is no file of a delta: {_CURE}")
    return _HEADS.decode(metadata[_HEAD], f"{file}: the metadata")


def _check_are_all(path: Path, heads: Sequence[Head]) -> None:
    """Raises ValueError unless these are all files of one delta."""
    first = heads[0]
    of_one = {(head.name, head.base, head.ranks) for head in heads}
    if len(of_one) > 1:
        raise ValueError(f"{path} has files of several deltas, {sorted(of_one)}: {_CURE}")
    if first.name == first.base:
        raise ValueError(f"{path} makes version {first.name!r} of itself: {_CURE}")
    ranks = sorted(head.rank for head in heads)
    if ranks != list(range(len(ranks))) or len(ranks) > first.ranks:
        raise ValueError(f"{path} has files of ranks {ranks} of {first.ranks}: {_CURE}")
    if len(ranks) < first.ranks:
        raise ValueError(
            f"{path} has the files of {len(ranks)} of {first.ranks} ranks: it is still written, or "
            "copied"
        )


def _column_of(key: str) -> tuple[str, int] | None:
    """Returns table and first column of the name of rows; None: it is none."""
    name, _, column = key.removeprefix(_ROWS).rpartition("/")
    # More digits are no column.
    is_number = column.isascii() and column.isdigit() and len(column) < 10
    return (name, int(column)) if name and is_number else None


def _joined(where: str, parts: Sequence[_StoredPart]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and whole rows of a table from those of each rank."""
    by_column: dict[int, list[tuple[torch.Tensor, Rows]]] = defaultdict(list)
    for part in parts:
        ids = part.ids.whole()
        if len(ids) and (int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all())):
            raise ValueError(f"the ids of {where} are not in ascending order, each once: {_CURE}")
        for column, rows in part.columns.items():
            by_column[column].append((ids, rows))
    blocks = [_block(where, shards) for _, shards in sorted(by_column.items())]
    _check_columns(where, dict(zip(sorted(by_column), blocks, strict=True)))
    ids, first = blocks[0]
    for other, _ in blocks:
        if not torch.equal(ids, other):
            raise ValueError(f"the shards of {where} have columns of different rows: {_CURE}")
    return ids, first if len(blocks) == 1 else torch.cat([rows for _, rows in blocks], dim=1)


def _block(
    where: str, shards: Sequence[tuple[torch.Tensor, Rows]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids in ascending order and rows of the shards that begin with one column."""
    forms = {(rows.dtype, rows.shape[1]) for _, rows in shards}
    if len(forms) > 1:
        raise ValueError(f"the shards of {where} are of several forms, {forms}: {_CURE}")
    ids = torch.cat([numbers for numbers, _ in shards])
    values = torch.cat([rows.whole() for _, rows in shards])
    ids, order = ids.sort()
    twice = ids[1:] == ids[:-1]
    if bool(twice.any()):
        row = int(ids[1:][twice][0])
        raise ValueError(f"two shards of {where} have row {row}: {_CURE}")
    return ids, values[order]


def _check_columns(where: str, blocks: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ValueError unless blocks of columns begin where others end."""
    end = 0
    for column, (_, rows) in blocks.items():
        if column != end:
            raise ValueError(
                f"the shards of {where} begin at columns {list(blocks)}, of which {column} is not "
                f"where the one before it ends ({end}): {_CURE}"
            )
        end += rows.shape[1]
