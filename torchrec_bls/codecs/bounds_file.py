"""The file that says how each table's embeddings travel, and with which error bound.

It is JSON: {"version": 1, "decay": {"start": 2.0, "iterations": 5000}, "backward": "fp32",
"link": 1.25e8, "ranks_per_core": 2, "tables": {"t0": {"bound": 0.01}, "t1": {"codec": "fp16"},
"t2": {"bound": 0.03, "stages": "auto", "measured": {"unique": {"ratio": 2.5, "encode": 4e9,
"decode": 6e9}}}}}. Without "decay" bounds stay. "stages" is a value of `Compression`, or "auto".
"auto" takes the best of those "measured" for the link (bytes per second) and the number of ranks on
a core (default 1), or none where that is faster for all such tables together. Other fields of a
table, and of the file, are for people.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from torchrec_bls.codecs.compression import Compression, Measured, chosen
from torchrec_bls.codecs.error_bound import Decay, ErrorBound
from torchrec_bls.records import AboveZero, Format, Positive, Record

VERSION = 1
AUTO = "auto"
_CURE = "write it by `torchrec-bls analyse-tables`, or give CodecConfig the bounds themselves"


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
    content = _FILE.read(path)
    sharing = content.ranks_per_core if ranks_per_core is None else ranks_per_core
    tables = content.tables
    try:
        decay = None if content.decay is None else Decay(**structs.asdict(content.decay))
        undecided = {
            name: measured
            for name, table in tables.items()
            if (measured := table.choice(name, link, content.link))
        }
        of_file = content.link if link is None else link
        of_link = chosen(undecided, of_file, sharing) if undecided and of_file is not None else {}
        stages = {
            name: of_link[name] if name in of_link else table.named_stages()
            for name, table in tables.items()
        }
        forward = {name: table.codec_by(decay, stages[name]) for name, table in tables.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    unique = {name: each is not None and each.unique for name, each in stages.items()}
    return {"forward": forward, "backward": content.backward, "unique": unique}


class _DecayRecord(Record):
    start: float
    iterations: Positive
    steps: Positive = Decay.steps
    kind: str = Decay.kind


class _TableRecord(Struct):
    """The entry of one table. Other fields are for people."""

    bound: AboveZero | None = None
    codec: str | None = None
    stages: str | None = None
    measured: dict[str, Measured] = {}

    def __post_init__(self) -> None:
        given = [each for each in (self.bound, self.codec) if each is not None]
        if len(given) != 1:
            raise ValueError(f"it has {len(given)} of bound and codec, but needs one of them")
        stages = self.named_stages()
        if self.codec is not None and stages is not None and stages.bounded:
            raise ValueError(f"it has a codec, and stages '{stages.value}', which need a bound")
        if self.stages == AUTO and not self.measured:
            raise ValueError('it has stages "auto", but no "measured"')
        for name in self.measured:
            _stages_named(name)
        if self.bound is not None:
            ErrorBound(self.bound)

    def choice(
        self, name: str, link: float | None, of_file: float | None
    ) -> dict[Compression, Measured]:
        """Returns the measurements by which stages are to be chosen for the link that is given, or
        for that of the file; empty where there is no choice."""
        if self.stages == AUTO and link is None and of_file is None:
            raise ValueError(
                f"table '{name}' has stages \"auto\", but no link is known: give from_file one, in "
                'bytes per second, or the file a "link"'
            )
        if self.stages != AUTO and link is None:
            return {}
        return {_stages_named(name): measured for name, measured in self.measured.items()}

    def named_stages(self) -> Compression | None:
        """Returns the stages that the entry names, or None."""
        return None if self.stages in (None, AUTO) else _stages_named(self.stages)

    def codec_by(self, decay: Decay | None, stages: Compression | None) -> str | ErrorBound:
        """Returns the codec that rows travel with."""
        if self.codec is not None:
            return self.codec
        assert self.bound is not None
        bound = ErrorBound(self.bound, decay, fixed_width=stages is Compression.FIXED)
        return bound if stages is None or stages.bounded else "fp32"


class _BoundsRecord(Struct):
    """The whole file. Other fields are for people."""

    version: int
    tables: dict[str, _TableRecord]
    decay: _DecayRecord | None = None
    backward: str = "fp32"
    link: float | None = None
    ranks_per_core: float = 1.0

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("it names no tables")


_FILE = Format(_BoundsRecord, _CURE, versions=(VERSION,))


def _stages_named(name: str) -> Compression:
    try:
        return Compression(name)
    except ValueError:
        names = ", ".join(repr(stages.value) for stages in Compression)
        raise ValueError(f"stages are {name!r}, but must be one of {names}, '{AUTO}'") from None
