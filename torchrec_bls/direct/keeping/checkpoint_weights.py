"""The weights of a checkpoint, and the name of the version that they make."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrec_bls.checkpoints import Checkpoint, open_checkpoint
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.new_weights import CheckpointWeights

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
    path, identity = checkpoint.path, checkpoint.identity
    name = "".join(each if each.isprintable() else "?" for each in path.resolve().name)
    most = _LONGEST - _DIGITS - 1
    shortened = name.encode(errors="replace")[:most].decode(errors="ignore")
    return f"{shortened}@{identity[:_DIGITS]}"
