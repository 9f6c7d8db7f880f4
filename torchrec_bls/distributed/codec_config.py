"""Which codec the rows of each table travel with: what users choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec.modules.embedding_configs import DataType

from torchrec_bls._deprecated import with_old_names
from torchrec_bls.codecs.bounds_file import read_bounds
from torchrec_bls.codecs.error_bound import ErrorBound
from torchrec_bls.codecs.rows import Codec

_NON_FINITE = ("keep", "refuse")
TableCodec = str | ErrorBound


@with_old_names
@dataclass(frozen=True)
class CodecConfig:
    """How the embeddings of tables travel, and the gradients of these.

    Codecs are "fp32" (as they are), "fp16", "bf16", "uint8", "uint4" and "uint2", see
    `torchrec_bls.codecs.rows.Codec`. An `ErrorBound` is a codec for embeddings only. A codec is for
    all tables, or each table has one by its name.

    Attributes:
        forward: codec of embeddings, at any bound.
        backward: codec of their gradients.
        non_finite: treatment of rows that hold NaN or infinities. "keep": they travel as they are
            where codes have no place for them. "refuse": the rank that has them raises ValueError,
            and the others raise PoisonedError.
        unique: whether rows of equal ids, or of equal bags of ids, travel once for each pair of
            ranks and forward, and their gradients as their sum; for all tables, or by name. Both
            ends see from the ids which rows are equal, so that this costs no bytes. Tables whose
            ids have weights are left out.
    """

    forward: TableCodec | Mapping[str, TableCodec] = "fp32"
    backward: str | Mapping[str, str] = "fp32"
    non_finite: str = "keep"
    unique: bool | Mapping[str, bool] = False

    def __post_init__(self) -> None:
        """Raises ValueError for codecs and policies that do not exist."""
        directions: tuple[tuple[str, Any], ...] = (
            ("forward", self.forward),
            ("backward", self.backward),
        )
        for direction, named in directions:
            if isinstance(named, Mapping):
                for table in named:
                    _codec_of(named, table, direction)
            else:
                _codec(named, f"the {direction} codec", direction)
        by_table = self.unique.values() if isinstance(self.unique, Mapping) else [self.unique]
        if not all(isinstance(each, bool) for each in by_table):
            raise ValueError(f"unique is {self.unique!r}, but must be True or False, or a mapping")
        if self.non_finite not in _NON_FINITE:
            raise ValueError(
                f"non_finite is {self.non_finite!r}, but must be one of {', '.join(_NON_FINITE)}"
            )

    @classmethod
    def from_file(
        cls, path: str | Path, link: float | None = None, ranks_per_core: float | None = None
    ) -> CodecConfig:
        """Returns the codecs of a file with bounds by table, such as `torchrec-bls analyse-tables`
        writes (docs/design/bounded-codec.md).

        Args:
            path: path of the file.
            link: bytes per second from one rank to the others. For each table with measured stages
                it chooses the fastest ones (equation 2 of Dual-Level Adaptive Lossy Compression).
                None: as the file says. `Profile.link` of `torchrec_bls.sharding` reads it from a
                calibration.
            ranks_per_core: number of ranks that share a core, at least 1, for the same choice;
                None: as the file says.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no such file, or of another version.
        """
        content = read_bounds(Path(path), link, ranks_per_core)
        try:
            return cls(**content)
        except ValueError as error:  # a codec that nobody knows
            raise ValueError(f"{path}: {error}") from error


def has_decay(config: CodecConfig) -> bool:
    """Returns whether a bound decays, so that messages depend on the training's iteration."""
    named = config.forward
    codecs = named.values() if isinstance(named, Mapping) else [named]
    return any(isinstance(each, ErrorBound) and each.decay is not None for each in codecs)


def finds_unique(config: CodecConfig) -> bool:
    """Returns whether equal rows of any table travel once."""
    unique = config.unique
    return any(unique.values()) if isinstance(unique, Mapping) else unique


def forward_of(config: CodecConfig, table: str) -> Codec | ErrorBound:
    """Returns the codec of the table's embeddings. Raises ValueError if it has none."""
    return _codec_of(config.forward, table, "forward")


def backward_of(config: CodecConfig, table: str) -> Codec:
    """Returns the codec of the table's gradients. Raises ValueError if there is none."""
    codec = _codec_of(config.backward, table, "backward")
    assert isinstance(codec, Codec)
    return codec


def unique_of(config: CodecConfig, table: str) -> bool:
    """Returns whether equal rows travel once. Raises ValueError if nothing says so."""
    if not isinstance(config.unique, Mapping):
        return config.unique
    if table not in config.unique:
        raise ValueError(
            f"unique says nothing of table '{table}': name every table of the module, or give "
            "one answer for all"
        )
    return config.unique[table]


def describe(config: CodecConfig, table: str) -> str:
    """Returns the three settings of a table in words. Raises ValueError if the table lacks one."""
    forward = forward_of(config, table)
    named = forward.name if isinstance(forward, Codec) else repr(forward)
    rows = "equal rows once" if unique_of(config, table) else "all rows"
    return f"{named} for embeddings, {backward_of(config, table).name} for gradients, {rows}"


def encode_any(config: CodecConfig, tables: Iterable[Any]) -> bool:
    """Returns whether rows or gradients of any of the tables are encoded, or travel once."""
    return any(_encodes(config, table.name) for table in tables)


def check_tables(config: CodecConfig, tables: Iterable[Any]) -> None:
    """Raises ValueError for a table without a codec, or for an encoded one that is not float32.

    Args:
        config: codecs of the tables.
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
    """
    for table in tables:
        if _encodes(config, table.name) and table.data_type != DataType.FP32:
            raise ValueError(
                f"table '{table.name}' is {table.data_type.name}, but only rows of FP32 can be "
                "encoded, or travel once: give it the codec fp32, and leave unique off"
            )


def _encodes(config: CodecConfig, table: str) -> bool:
    codecs = {forward_of(config, table), backward_of(config, table)}
    return codecs != {Codec.FP32} or unique_of(config, table)


def _codec(named: TableCodec, what: str, direction: str) -> Codec | ErrorBound:
    if isinstance(named, ErrorBound):
        if direction == "backward":
            raise ValueError(
                f"{what} is an ErrorBound, but gradients have no usual size to choose a bound by: "
                "choose fp16, bf16 or uint8 for them"
            )
        return named
    try:
        return Codec[named.upper()]
    except (AttributeError, KeyError):
        names = ", ".join(codec.name.lower() for codec in Codec)
        more = " or an ErrorBound" if direction == "forward" else ""
        raise ValueError(f"{what} is {named!r}, but must be one of {names}{more}") from None


def _codec_of(
    named: TableCodec | Mapping[str, Any], table: str, direction: str
) -> Codec | ErrorBound:
    if not isinstance(named, Mapping):
        return _codec(named, f"the {direction} codec", direction)
    if table not in named:
        raise ValueError(
            f"table '{table}' has no {direction} codec: name one for every table of the module, or "
            "one for all"
        )
    return _codec(named[table], f"the {direction} codec of table '{table}'", direction)
