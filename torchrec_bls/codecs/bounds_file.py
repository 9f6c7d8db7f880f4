"""The file that says how each table's embeddings travel, and with which error bound.

It is JSON: {"version": 1, "decay": {"start": 2.0, "iterations": 5000}, "backward": "fp32",
"link": 1.25e8, "ranks_per_core": 2, "tables": {"t0": {"bound": 0.01}, "t1": {"codec": "fp16"},
"t2": {"bound": 0.03, "stages": "auto", "measured": {"unique": {"ratio": 2.5, "encode": 4e9,
"decode": 6e9}}}}}. Without "decay" bounds stay. "stages" is the name of one of `Stages`, or "auto".
"auto" takes the best of those "measured" for the link (bytes per second) and the number of ranks on
a core (default 1), or none where that is faster for all such tables together. Other fields of a
table are for people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchrec_bls.codecs.error_bound import Decay, ErrorBound
from torchrec_bls.codecs.stages import Measured, Stages, chosen

VERSION = 1
AUTO = "auto"
_CURE = "see docs/design/bounded-codec.md for what it holds"


def read_bounds(
    path: Path, link: float | None = None, ranks_per_core: float | None = None
) -> dict[str, Any]:
    """Returns `forward`, `backward` and `unique` of a CodecConfig.

    Args:
        path: path of the file.
        link: bytes per second from one rank to the others. It chooses the stages of all tables that
            have measurements; None: as the file says.
        ranks_per_core: number of ranks that share a core, for the same choice; None: as the file
            says.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no such file, or of another version.
    """
    content = _content(path)
    decay = content.get("decay")
    if decay is not None:
        decay = _made(Decay, decay, f"{path}: decay")
    forward: dict[str, str | ErrorBound] = {}
    unique: dict[str, bool] = {}
    sharing = content.get("ranks_per_core", 1.0) if ranks_per_core is None else ranks_per_core
    readers = {
        name: _Table(f"{path}: table '{name}'", table) for name, table in content["tables"].items()
    }
    of_file: Any = content.get("link")
    undecided = {
        name: measured
        for name, reader in readers.items()
        if (measured := reader.choice(link, of_file))
    }
    try:
        of_link = chosen(undecided, of_file if link is None else link, sharing) if undecided else {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, reader in readers.items():
        stages = of_link[name] if name in of_link else reader.stages()
        forward[name] = reader.codec(decay, stages)
        unique[name] = stages is not None and stages.unique
    return {"forward": forward, "backward": content.get("backward", "fp32"), "unique": unique}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # from UTF-8 or JSON
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
    return content


class _Table:
    """The file's entry for one table."""

    def __init__(self, where: str, content: object) -> None:
        self._where = where
        self._content: dict[str, Any] = content if isinstance(content, dict) else {}

    def choice(self, link: float | None, of_file: float | None) -> dict[Stages, Measured]:
        """Returns the measurements by which stages are to be chosen for the link that is given, or
        for that of the file; empty where there is no choice."""
        measured = self._measured()
        if self._content.get("stages") != AUTO:
            return {} if link is None else measured
        if not measured:
            raise ValueError(f'{self._where} has stages "auto", but no "measured": {_CURE}')
        if link is None and of_file is None:
            raise ValueError(
                f'{self._where} has stages "auto", but no link is known: give from_file one, in '
                'bytes per second, or the file a "link"'
            )
        return measured

    def stages(self) -> Stages | None:
        """Returns the stages that the entry names, or None."""
        given = self._content.get("stages")
        return None if given is None else self._stages_named(given)

    def codec(self, decay: Decay | None, stages: Stages | None) -> str | ErrorBound:
        """Returns the codec that rows travel with."""
        given = [key for key in ("bound", "codec") if key in self._content]
        if len(given) != 1:
            raise ValueError(
                f"{self._where} has {len(given)} of bound and codec, but needs one of them"
            )
        if given == ["codec"]:
            if stages is not None and stages.bounded:
                raise ValueError(
                    f"{self._where} has a codec, and stages '{stages.value}', which need a bound"
                )
            codec: str = self._content["codec"]
            return codec
        bound: ErrorBound = _made(
            ErrorBound,
            {
                "bound": self._content["bound"],
                "decay": decay,
                "fixed_width": stages is Stages.FIXED,
            },
            self._where,
        )
        return bound if stages is None or stages.bounded else "fp32"

    def _measured(self) -> dict[Stages, Measured]:
        measured = self._content.get("measured", {})
        if not isinstance(measured, dict):
            raise ValueError(f"{self._where}: measured is {measured!r}, but must be an object")
        return {
            self._stages_named(name): _made(Measured, numbers, f"{self._where}: measured '{name}'")
            for name, numbers in measured.items()
        }

    def _stages_named(self, name: object) -> Stages:
        try:
            return Stages(name)
        except ValueError:
            names = ", ".join(repr(stages.value) for stages in Stages)
            raise ValueError(
                f"{self._where}: stages are {name!r}, but must be one of {names}, '{AUTO}'"
            ) from None


def _made(kind: Any, arguments: object, where: str) -> Any:
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} is {arguments!r}, but must be an object: {_CURE}")
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
