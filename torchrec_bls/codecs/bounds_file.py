"""The file that says by which bound each table's embeddings travel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchrec_bls.codecs.error_bound import Decay, ErrorBound

VERSION = 1
_CURE = "see docs/design/bounded-codec.md for what it holds"


def read_bounds(path: Path) -> dict[str, Any]:
    """Returns `forward` and `backward` of a CodecConfig.

    The file is JSON: {"version": 1, "decay": {"start": 2.0, "iterations": 5000}, "backward":
    "fp32", "tables": {"t0": {"bound": 0.01}, "t1": {"codec": "fp16"}}}. Without "decay" bounds
    stay; what else it says of a table is for its readers.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no such file, or one of another version.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # of UTF-8 and of JSON
        raise ValueError(f"{path} is no JSON ({error}): {_CURE}") from error
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError(f"{path} does not say its version: {_CURE}")
    if content["version"] != VERSION:
        raise ValueError(
            f"{path} is of version {content['version']!r}, but this package reads version "
            f"{VERSION}: write it again with this package"
        )
    tables = content.get("tables")
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"{path} names no tables: {_CURE}")
    decay = content.get("decay")
    if decay is not None:
        decay = _made(Decay, decay, f"{path}: decay")
    forward = {name: _codec(path, name, table, decay) for name, table in tables.items()}
    return {"forward": forward, "backward": content.get("backward", "fp32")}


def _codec(path: Path, name: str, table: object, decay: Decay | None) -> str | ErrorBound:
    known = table if isinstance(table, dict) else {}
    given = [known[key] for key in ("bound", "codec") if key in known]
    if len(given) != 1:
        raise ValueError(
            f"{path}: table '{name}' has {len(given)} of bound and codec, but needs one of them"
        )
    if "codec" in known:
        codec: str = known["codec"]
        return codec
    bound: ErrorBound = _made(
        ErrorBound, {"bound": known["bound"], "decay": decay}, f"{path}: table '{name}'"
    )
    return bound


def _made(kind: Any, arguments: object, where: str) -> Any:
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} is {arguments!r}, but must be an object: {_CURE}")
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
