"""A folder of samples: the lookups of a model for some batches.

`samples.json` names the tables. `batch-00000.npz` and so on hold a batch each: the ids, lengths and
rows of each feature. An array's name has the numbers of table and feature: "3.0.ids".
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION = 1
FILE = "samples.json"
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
    rows: int
    dim: int
    pooled: bool
    weighted: bool
    data_type: str
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for values that are impossible."""
        for name in ("name", "data_type"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"its {name} is {getattr(self, name)!r}, but must be a text")
        for name in ("rows", "dim"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"its {name} is {number!r}, but must be a positive number")
        for name in ("pooled", "weighted"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"its {name} is {getattr(self, name)!r}, but must be a boolean")
        if not self.features or not all(isinstance(name, str) for name in self.features):
            raise ValueError(f"its features are {self.features!r}, but must be texts")


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
        content = _content(file)
        try:
            self.tables = [_table(table) for table in content["tables"]]
            self.batches = int(content["batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is damaged ({error!r}): {_CURE}") from error
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names or self.batches < 1:
            raise ValueError(
                f"{file} has {self.batches} batches of {len(names)} tables"
                f"{f', {twice} twice' if twice else ''}: {_CURE}"
            )

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
            with np.load(file, allow_pickle=False) as arrays:
                for feature in range(len(table.features)):
                    parts = (arrays[f"{index}.{feature}.{part}"] for part in Lookup._fields)
                    lookups.append(Lookup(*parts))
                    lookups[-1].check(table)
        except FileNotFoundError:
            raise ValueError(
                f"{file} is missing, of {self.batches} batches that {FILE} has: {_CURE}"
            ) from None
        except (
            AttributeError,  # for a single array, which has no names
            EOFError,
            KeyError,
            OSError,
            TypeError,
            ValueError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise ValueError(
                f"{file}, table '{table.name}', is damaged ({error}): {_CURE}"
            ) from error
        return lookups


def _name_of(batch: int) -> str:
    return f"batch-{batch:05}.npz"


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:  # from UTF-8 or JSON
        raise ValueError(f"{file} is no JSON ({error}): {_CURE}") from error
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError(f"{file} does not say its version: {_CURE}")
    if content["version"] != VERSION:
        raise ValueError(
            f"{file} is of version {content['version']!r}, but this package reads version "
            f"{VERSION}: {_CURE}"
        )
    return content


def _table(content: dict[str, Any]) -> SampledTable:
    return SampledTable(**{**content, "features": tuple(content["features"])})
