"""Bytes that others wrote: read with a bound, and checked against a form.

A form is a type: a `Record` with annotated fields, or a dataclass. Its `__post_init__` may raise
ValueError for what types can't say. Whatever is wrong with the bytes, the reader gets one error,
with the path of the file, the place in it and the reason: "plan.json: tables[3].rows: expected int
>= 1, got '7': plan again".
"""

from __future__ import annotations

import gzip
import re
import reprlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

#: Bytes of a file, unpacked, unless its reader says otherwise. Lists of nothing take 20 times as
#: much memory as their text.
MOST_BYTES = 16 << 20
# Of text for each object and each list in larger ones, on average. Real traces have twice as much.
_OBJECT_BYTES, _LIST_BYTES = 32, 8
# Real traces are up to 20 times as large unpacked. So a small file can't ask for much memory.
_MOST_TIMES, _LEAST_UNPACKED = 100, 16 << 20
_LONGEST_REASON = 300
# Keys of an object that are tried, to name the one with the fault.
_MOST_KEYS = 1000

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
#: At least two ranks, of which there is a collective.
Ranks = Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object with the annotated fields, and no others."""


class _Head(msgspec.Struct):
    format: Any = None
    version: Any = None


@dataclass(frozen=True)
class Format(Generic[T]):
    """A kind of JSON file.

    Attributes:
        form: type of the whole content.
        cure: what to do about a file that can't be read.
        error: type of the errors.
        name: value of the field "format"; None: files of this kind have none.
        versions: values of the field "version" that can be read; empty: files have none.
        most_bytes: most bytes of a file, unpacked.
    """

    form: type[T]
    cure: str
    error: Callable[[str], Exception] = ValueError
    name: str | None = None
    versions: tuple[int, ...] = ()
    most_bytes: int = MOST_BYTES

    def read(self, path: Path) -> T:
        """Returns the content of a file; one that ends in .gz is compressed.

        Raises:
            error: the file has something else, or is too large.
            OSError: the file can't be read.
        """
        return self.decode(read_bytes(path, self.most_bytes, self.error), str(path))

    def decode(self, data: bytes | str, where: str) -> T:
        """Returns the content of bytes that came from `where`.

        Raises:
            error: the bytes are something else.
        """
        if self.name is not None or self.versions:
            self._check_head(data, where)
        return decode(data, self.form, where, self.cure, self.error)

    def _check_head(self, data: bytes | str, where: str) -> None:
        is_object = data.lstrip()[:1] in (b"{", "{")
        head = decode(data, _Head if is_object else object, where, self.cure, self.error)
        if not isinstance(head, _Head) or (self.name is not None and head.format != self.name):
            what = "JSON object" if self.name is None else self.name
            raise self.error(f"{where} is not a {what}: {self.cure}")
        if self.versions and not _is_one_of(head.version, self.versions):
            known = " and ".join(map(str, self.versions))
            raise self.error(
                f"{where} has version {reprlib.repr(head.version)}, and this package reads "
                f"{known}: {self.cure}"
            )


def decode(
    data: bytes | str | msgspec.Raw,
    form: type[T],
    where: str,
    cure: str,
    error: Callable[[str], Exception] = ValueError,
) -> T:
    """Returns JSON as `form`.

    NaN, infinities, numbers beyond the form's range and deep nesting are refused. Of equal keys the
    last one counts.

    Args:
        data: JSON in UTF-8.
        form: type of the content.
        where: source of the bytes, for the error.
        cure: what to do about bytes that can't be read, for the error.
        error: type of the error.

    Raises:
        error: the bytes are something else.
    """
    if isinstance(data, bytes) and len(data) > MOST_BYTES:
        objects, lists = data.count(b"{"), data.count(b"[")
        if objects * _OBJECT_BYTES + lists * _LIST_BYTES > len(data):
            raise error(
                f"{where} has {objects:,} objects and {lists:,} lists in {len(data):,} bytes, "
                f"which take many times as much memory, and so is not read: {cure}"
            )
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.ValidationError as refused:
        raise error(f"{where}: {_reason(str(refused), data, form)}: {cure}") from refused
    except (msgspec.DecodeError, UnicodeError) as refused:
        raise error(f"{where} is no JSON, or cut off ({refused}): {cure}") from refused
    except RecursionError:
        raise error(f"{where} has objects too deep in each other: {cure}") from None


def read_bytes(
    path: Path,
    most: int = MOST_BYTES,
    error: Callable[[str], Exception] = ValueError,
) -> bytes:
    """Returns the bytes of a file; one that ends in .gz is unpacked.

    Args:
        path: path of the file.
        most: most bytes to return.
        error: type of the error.

    Raises:
        error: the file has more bytes, or is a damaged .gz.
        OSError: the file can't be read.
    """
    if path.suffix != ".gz":
        with path.open("rb") as file:
            data = file.read(most + 1)
    else:
        most = min(most, max(_LEAST_UNPACKED, _MOST_TIMES * path.stat().st_size))
        try:
            with gzip.open(path) as unpacked:
                data = unpacked.read(most + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as damaged:
            raise error(f"{path} is a damaged .gz, or cut off: {damaged}") from damaged
    if len(data) > most:
        raise error(f"{path} has more than {most:,} bytes, and so is not read")
    return data


def _is_one_of(version: object, versions: tuple[int, ...]) -> bool:
    return type(version) is int and version in versions


def _reason(text: str, data: bytes | str | msgspec.Raw, form: Any) -> str:
    """Returns place and reason of msgspec's error in our words."""
    reason, _, path = text.partition(" - at `")
    path = path.removeprefix("key` in `").rstrip("`").replace("$.", "").replace("$", "")
    place, found = _place_of(path, text, data, form)
    reason = re.sub(r"Object missing required field `(.*)`", r"'\1' is missing", reason)
    reason = re.sub(r"Object contains unknown field `(.*)`", r"'\1' is unknown", reason)
    if reason.startswith("Expected"):
        reason = reason.split(", got")[0].replace("`", "").replace(" | null", "")
        reason = f"expected{reason.removeprefix('Expected')}{found}"
    named = f"{place}: {reason}" if place else reason
    return named if len(named) <= _LONGEST_REASON else named[:_LONGEST_REASON] + "..."


def _place_of(path: str, text: str, data: bytes | str | msgspec.Raw, form: Any) -> tuple[str, str]:
    """Returns a path with the names of keys, which msgspec's lacks, and what stands there."""
    if isinstance(data, msgspec.Raw) or len(data) > MOST_BYTES:
        return path, ""
    place = ""
    try:
        value = content = msgspec.json.decode(data)
        for name, item in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
            if item == "...":
                keys = islice(value, _MOST_KEYS)
                key: Any = next(
                    key for key in keys if _fails_alike(content, value, key, form, text)
                )
                place += f"[{key!r}]"
            else:
                key = int(item) if item else name
                place += f"[{key}]" if item else f".{key}"
            value = value[key]
    except (ValueError, LookupError, TypeError, RecursionError, StopIteration, msgspec.DecodeError):
        return path, ""
    return place.lstrip("."), f", got {reprlib.repr(value)}"


def _fails_alike(content: Any, of: dict[str, Any], key: str, form: Any, text: str) -> bool:
    """Returns whether the error is the same with only this key of an object in the content."""
    every = dict(of)
    of.clear()
    of[key] = every[key]
    try:
        msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        return str(error) == text
    finally:
        of.clear()
        of.update(every)
    return False
