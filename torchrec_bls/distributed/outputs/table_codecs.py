"""Which codec each looked-up feature of a rank travels with."""

from typing import Any, NamedTuple

from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.codec_config import CodecConfig


class CodedFeature(NamedTuple):
    """A feature as it is looked up on one rank."""

    codec: Codec
    columns: int


class CodecPlan(NamedTuple):
    """What is looked up on each rank, [rank][feature] in the order of the lookups.

    Attributes:
        forward: None if all of it travels as it is.
        backward: likewise.
    """

    forward: list[list[CodedFeature]] | None
    backward: list[list[CodedFeature]] | None


def plan_codecs(config: CodecConfig, sharding: Any) -> CodecPlan:
    """Returns the codecs of one of TorchRec's shardings."""
    tables = [
        [table for group in groups for table in group.embedding_tables for _ in table.feature_names]
        for groups in sharding._grouped_embedding_configs_per_rank
    ]

    def planned(codec_of: Any) -> list[list[CodedFeature]] | None:
        by_rank = [
            [CodedFeature(codec_of(table.name), table.local_cols) for table in of_rank]
            for of_rank in tables
        ]
        coded = any(feature.codec != Codec.FP32 for of_rank in by_rank for feature in of_rank)
        return by_rank if coded else None

    return CodecPlan(planned(config.forward_of), planned(config.backward_of))
