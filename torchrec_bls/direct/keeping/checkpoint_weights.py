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


class _Checkpoint(dict[str, Any]):
    identity: str


@contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[_Checkpoint]:
    """Stands for torchrec_bls.checkpoints."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.pt"))
    if len(files) != 1:
        raise ValueError(f"{path} is no checkpoint: {len(files)} files")
    try:
        weights = torch.load(files[0], mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(f"{files[0]} can't be read: {error}") from error
    found = files[0].stat()
    facts = repr((files[0].name, found.st_size, found.st_ino, found.st_mtime_ns)).encode()
    made = _Checkpoint(weights)
    made.identity = hashlib.sha256(facts).hexdigest()
    yield made


@contextmanager
def opened(checkpoint: AnyCheckpoint) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Opens a checkpoint. Yields its weights by name, which are read when they are used, and the
    name of the version that they make.

    Raises:
        ValueError: there is no complete checkpoint at a path.
    """
    if isinstance(checkpoint, Mapping):
        yield checkpoint, FIRST_VERSION
        return
    with open_checkpoint(checkpoint) as weights:
        yield weights, _version_of(Path(checkpoint), weights.identity)


def version_of_checkpoint(checkpoint: AnyCheckpoint) -> str:
    """Returns the name of the version that a checkpoint makes: `step-9000@3f2a91bc`.

    It has the first digits of the identity, so that whoever takes over from another process knows
    which files serve, and files that were written anew are another version.

    Raises:
        ValueError: there is no complete checkpoint at the path.
    """
    with opened(checkpoint) as (_, version):
        return version


def completed_at(path: Path) -> int:
    """Returns when the last file of a checkpoint was written, in nanoseconds since 1970.

    Raises:
        OSError: there is no file, or not any more.
    """
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    if not files:
        raise FileNotFoundError(f"{path} has no files")
    return max(file.stat().st_mtime_ns for file in files)


def _version_of(path: Path, identity: str) -> str:
    name = "".join(each if each.isprintable() else "?" for each in path.resolve().name)
    most = _LONGEST - _DIGITS - 1
    shortened = name.encode(errors="replace")[:most].decode(errors="ignore")
    return f"{shortened}@{identity[:_DIGITS]}"
