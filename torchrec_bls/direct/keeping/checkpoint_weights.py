"""The weights of a checkpoint, and the name of the version that they make."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchrec_bls.direct.arguments import FIRST_VERSION

#: A path, or weights by their names in the model's state dict.
AnyCheckpoint = str | os.PathLike[str] | Mapping[str, Any]

# Most bytes of a version's name, and of the identity in it.
_LONGEST = 64
_DIGITS = 8


@contextmanager
def opened(checkpoint: AnyCheckpoint) -> Iterator[Mapping[str, Any]]:
    """Yields the weights of a checkpoint by name. They are read when they are used.

    Raises:
        ValueError: there is no checkpoint at a path.
    """
    if isinstance(checkpoint, Mapping):
        yield checkpoint
        return
    path = Path(checkpoint)
    files = [path] if path.is_file() else sorted(path.glob("*.pt"))
    if len(files) != 1:
        raise ValueError(f"{path} is no checkpoint: {len(files)} files")
    try:
        weights = torch.load(files[0], mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(f"{files[0]} can't be read: {error}") from error
    yield weights


def why_incomplete(path: Path) -> str:
    """Returns what a checkpoint lacks; empty if it is complete."""
    if path.is_file() or len(list(path.glob("*.pt"))) == 1:
        return ""
    return "it has no file *.pt"


def version_of_checkpoint(checkpoint: AnyCheckpoint) -> str:
    """Returns the name of the version that a checkpoint makes: `step-9000@3f2a91bc`.

    It has the first digits of the identity, so that whoever takes over from another process knows
    which files serve, and files that were written anew are another version.
    """
    if isinstance(checkpoint, Mapping):
        return FIRST_VERSION
    path = Path(checkpoint).resolve()
    identity = _identity_of(path)[:_DIGITS]
    name = "".join(each if each.isprintable() else "?" for each in path.name)
    most = _LONGEST - len(identity) - 1
    return f"{name.encode(errors='replace')[:most].decode(errors='ignore')}@{identity}"


def completed_at(path: Path) -> int:
    """Returns when the last file of a checkpoint was written, in nanoseconds since 1970."""
    return max(found.st_mtime_ns for _, found in _files_of(path))


def _identity_of(path: Path) -> str:
    facts = [
        (name, found.st_size, found.st_ino, found.st_mtime_ns) for name, found in _files_of(path)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _files_of(path: Path) -> list[tuple[str, os.stat_result]]:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    if not files:
        raise ValueError(f"{path} has no files")
    return [(str(file.relative_to(path)), file.stat()) for file in files]
