"""A folder of samples: the lookups of a model for some batches.

`samples.json` names the tables. `batch-00000.npz` and so on hold a batch each: the ids, lengths and
rows of each feature. An array's name has the numbers of table and feature: "3.0.ids".
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta
from numpy.lib import format as npy

from torchrec_bls.records import Format, Positive, Record

VERSION = 1
FILE = "samples.json"
# Of one array of one batch.
_MOST_BYTES = 1 << 29
_CURE = "record the samples again with torchrec_bls.record_lookups"

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledTable:
    """A table whose lookups were recorded.

    Attributes:
        name: name of the table.
        rows: number of its rows.
        dim: number of its columns.
        pooled: whether each bag of ids has one row; otherwise each id has one.
        weighted: whether ids of bags have weights.
        data_type: TorchRec's name for the type of its rows, "FP32" for instance.
        features: names of the features that are looked up in it.
    """

    name: str
    rows: Positive
    dim: Positive
    pooled: bool
    weighted: bool
    data_type: str
    features: Annotated[tuple[str, ...], Meta(min_length=1)]


class Lookup(NamedTuple):
    """The lookup of one batch for one feature in one table.

    Attributes:
        ids: (ids,) int64, ids of all samples.
        lengths: (samples,) int64, number of ids of each sample's bag.
        rows: (samples, dim) float32 where bags are pooled, else (ids, dim).
    """

    ids: Integers
    lengths: Integers
    rows: Floats

    @classmethod
    def nothing(cls, dim: int) -> Lookup:
        """Returns the lookup of a batch without samples."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, dim), np.float32))

    def check(self, table: SampledTable) -> None:
        """Raises ValueError for arrays that can't come from a lookup in `table`."""
        for name, array, kind, dimensions in (
            ("ids", self.ids, np.int64, 1),
            ("lengths", self.lengths, np.int64, 1),
            ("rows", self.rows, np.float32, 2),
        ):
            if array.dtype != kind or array.ndim != dimensions:
                raise ValueError(
                    f"{name} are {array.dtype} of {array.ndim} dimensions in place of "
                    f"{np.dtype(kind)} of {dimensions}"
                )
        if (self.lengths < 0).any() or self.lengths.sum() != len(self.ids):
            raise ValueError(f"lengths of bags do not add up to {len(self.ids)} ids")
        shape = (len(self.lengths if table.pooled else self.ids), table.dim)
        if self.rows.shape != shape:
            raise ValueError(f"rows have the shape {self.rows.shape} in place of {shape}")


class SampleWriter:
    """Writes a folder of samples.

    Args:
        path: path of the folder; it is made unless it is there and empty.
        names: names of the tables.

    Raises:
        FileExistsError: something is in the folder.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(
                f"{path} is not empty: name another folder for the samples, a different one on "
                "each rank that records"
            )
        self._path = path
        self._names = list(names)
        self._batches = 0

    def add(self, lookups: Mapping[str, Sequence[Lookup]]) -> None:
        """Writes a batch: its lookups by table, one for each feature."""
        arrays: dict[str, Any] = {}
        for index, name in enumerate(self._names):
            for feature, lookup in enumerate(lookups[name]):
                for part, array in lookup._asdict().items():
                    arrays[f"{index}.{feature}.{part}"] = array
        with (self._path / _name_of(self._batches)).open("xb") as file:
            np.savez(file, **arrays)
        self._batches += 1

    def finish(self, tables: Sequence[SampledTable]) -> None:
        """Writes the file that `Samples` reads first. A folder without it is an incomplete
        recording.

        Args:
            tables: the tables with the names above.
        """
        content = {
            "version": VERSION,
            "batches": self._batches,
            "tables": [asdict(table) for table in tables],
        }
        (self._path / FILE).write_text(json.dumps(content, indent=2) + "\n")


class Samples:
    """A folder of samples. It is read one table at a time.

    Args:
        path: path of the folder.

    Attributes:
        batches: number of recorded batches.
        tables: tables that the batches looked up.

    Raises:
        FileNotFoundError: there is no such folder, or its recording is not complete.
        ValueError: the folder has something else, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = path / FILE
        if not file.exists():
            raise FileNotFoundError(
                f"{path} has no {FILE}: it is no folder of samples, or its recording was cut "
                f"short; {_CURE}"
            )
        content = _FILE.read(file)
        self.tables, self.batches = content.tables, content.batches

    def of(self, table: SampledTable) -> list[list[Lookup]]:
        """Returns the lookups of each batch in a table, [batch][feature].

        Raises:
            ValueError: a file is missing or damaged.
        """
        return [
            self._read(self._path / _name_of(batch), self.tables.index(table))
            for batch in range(self.batches)
        ]

    def _read(self, file: Path, index: int) -> list[Lookup]:
        table = self.tables[index]
        lookups = []
        try:
            with zipfile.ZipFile(file) as arrays:
                for feature in range(len(table.features)):
                    parts = (_array(arrays, f"{index}.{feature}.{part}") for part in Lookup._fields)
                    lookups.append(Lookup(*parts))
                    lookups[-1].check(table)
        except FileNotFoundError:
            raise ValueError(
                f"{file} is missing, of {self.batches} batches that {FILE} has: {_CURE}"
            ) from None
        except Exception as error:  # whatever zipfile and numpy make of the bytes
            raise ValueError(
                f"{file}, table '{table.name}', is damaged ({error}): {_CURE}"
            ) from error
        return lookups


def _name_of(batch: int) -> str:
    return f"batch-{batch:05}.npz"


def _array(arrays: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    """Returns an array, if it is as large as its header says."""
    entry = arrays.getinfo(f"{name}.npy")
    if entry.file_size > _MOST_BYTES:
        raise ValueError(f"{name} has {entry.file_size:,} bytes, more than {_MOST_BYTES:,}")
    with arrays.open(entry) as stored:
        version = npy.read_magic(stored)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stored)
    # numpy would ask for the memory before it reads.
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"{name} is shorter than its shape {shape}")
    with arrays.open(entry) as stored:
        array: npt.NDArray[Any] = npy.read_array(stored, allow_pickle=False)
    return array


class _SamplesRecord(Record):
    version: int
    batches: Positive
    tables: Annotated[list[SampledTable], Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tables {twice} are there twice")


_FILE = Format(_SamplesRecord, _CURE, versions=(VERSION,))
