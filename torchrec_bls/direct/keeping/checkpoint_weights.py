"""The weights of a checkpoint, and the name of the version that they make."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrec_bls.checkpoints import Checkpoint, open_checkpoint
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.new_weights import CheckpointWeights

#: Order of checkpoints and deltas by time. Those of one time, which were unpacked together for
#: example, are in the order of the numbers in their names.
Order = tuple[int, list[int], str]

#: A path, or weights by their names in the model's state dict.
AnyCheckpoint = str | os.PathLike[str] | Mapping[str, Any]

# Most bytes of a version's name, and of the identity in it.
_LONGEST = 64
_DIGITS = 8


@contextmanager
def opened(checkpoint: AnyCheckpoint) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Opens a checkpoint. Yields its weights by name, which are read when they are used, and the
    name of the version that they make.

    Args:
        checkpoint: path of a checkpoint, or the weights.

    Raises:
        ValueError: there is no complete checkpoint at a path.
    """
    if isinstance(checkpoint, Mapping):
        yield checkpoint, FIRST_VERSION
        return
    with open_checkpoint(checkpoint) as found:
        yield CheckpointWeights(found), _version_of(found)


def version_of_checkpoint(checkpoint: str | os.PathLike[str]) -> str:
    """Returns the name of the version that a checkpoint makes: `step-9000@3f2a91bc`.

    It has the first digits of the identity, so that whoever takes over from another process knows
    which files serve, and files that were written anew are another version.

    Raises:
        ValueError: there is no complete checkpoint at the path.
    """
    with open_checkpoint(checkpoint) as found:
        return _version_of(found)


def is_of_checkpoint(version: str, name: str) -> bool:
    """Returns whether a version is one that a checkpoint makes whose file or folder has a name."""
    shown, _, digits = version.rpartition("@")
    return shown == _shown(name) and re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", digits) is not None


def order_of(path: Path) -> Order:
    """Returns the order of a checkpoint or delta among others. Raises OSError if it has no
    files."""
    return completed_at(path), list(map(int, re.findall(r"[0-9]+", path.name))), path.name


def completed_at(path: Path) -> int:
    """Returns when the last file of a checkpoint was written, in nanoseconds since 1970.

    Raises:
        OSError: there is no file, or not any more.
    """
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    if not files:
        raise FileNotFoundError(f"{path} has no files")
    return max(file.stat().st_mtime_ns for file in files)


def _version_of(checkpoint: Checkpoint) -> str:
    return f"{_shown(checkpoint.path.resolve().name)}@{checkpoint.identity[:_DIGITS]}"


def _shown(name: str) -> str:
    """Returns as much of a name as a version has of it."""
    printable = "".join(each if each.isprintable() else "?" for each in name)
    most = _LONGEST - _DIGITS - 1
    return printable.encode(errors="replace")[:most].decode(errors="ignore")
