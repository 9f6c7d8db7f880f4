"""Which codec the rows of each table travel with: what users choose."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.modules.embedding_configs import DataType

from torchrec_bls.codecs.rows import Codec

_NON_FINITE = ("keep", "refuse")


@dataclass(frozen=True)
class CodecConfig:
    """How the embeddings of tables travel, and the gradients of these.

    Codecs are "fp32" (as they are), "fp16", "bf16", "uint8", "uint4" and "uint2", see
    `torchrec_bls.codecs.rows.Codec`; one for all tables, or one for each by its name.

    Attributes:
        forward: of embeddings, at any bound.
        backward: of their gradients.
        non_finite: what becomes of rows that hold NaN or infinities: "keep" lets them travel as
            they are where codes have no place for them, "refuse" raises ValueError on the rank that
            has them and PoisonedError on the others.
    """

    forward: str | Mapping[str, str] = "fp32"
    backward: str | Mapping[str, str] = "fp32"
    non_finite: str = "keep"

    def __post_init__(self) -> None:
        """Raises ValueError for codecs and policies that do not exist."""
        for direction, named in (("forward", self.forward), ("backward", self.backward)):
            if isinstance(named, Mapping):
                for table in named:
                    _codec_of(named, table, direction)
            else:
                _codec(named, f"the {direction} codec")
        if self.non_finite not in _NON_FINITE:
            raise ValueError(
                f"non_finite is {self.non_finite!r}, but must be one of {', '.join(_NON_FINITE)}"
            )

    def forward_of(self, table: str) -> Codec:
        """Returns the codec of the table's embeddings. Raises ValueError if it has none."""
        return _codec_of(self.forward, table, "forward")

    def backward_of(self, table: str) -> Codec:
        """Returns the codec of its gradients. Raises ValueError if it has none."""
        return _codec_of(self.backward, table, "backward")

    def check(self, tables: Iterable[Any]) -> None:
        """Raises ValueError for a table without a codec, or whose rows are not float32.

        Args:
            tables: EmbeddingConfig or EmbeddingBagConfig of each.
        """
        for table in tables:
            codecs = {self.forward_of(table.name), self.backward_of(table.name)}
            if codecs != {Codec.FP32} and table.data_type != DataType.FP32:
                raise ValueError(
                    f"table '{table.name}' is {table.data_type.name}, but only rows of FP32 can be "
                    "encoded: give it the codec fp32"
                )


def _codec(name: str, what: str) -> Codec:
    try:
        return Codec[name.upper()]
    except (AttributeError, KeyError):
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise ValueError(f"{what} is {name!r}, but must be one of {names}") from None


def _codec_of(named: str | Mapping[str, str], table: str, direction: str) -> Codec:
    if not isinstance(named, Mapping):
        return _codec(named, f"the {direction} codec")
    if table not in named:
        raise ValueError(
            f"table '{table}' has no {direction} codec: name one for every table of the module, or "
            "one for all"
        )
    return _codec(named[table], f"the {direction} codec of table '{table}'")
