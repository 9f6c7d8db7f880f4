"""The codec of each feature that a rank looks up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchrec_bls import _native
from torchrec_bls.codecs.error_bound import ErrorBound, bound_at
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.codec_config import (
    CodecConfig,
    backward_of,
    forward_of,
    has_decay,
    unique_of,
)

# Codec's number in frames, columns, bound of the error or 0, and whether codes have a fixed width.
_Encoded = tuple[int, int, float, bool]


class CodedFeature(NamedTuple):
    """A feature as it is looked up on one rank."""

    codec: Codec | ErrorBound
    columns: int


class EncodedFeatures:
    """The way in which the features of a rank travel in one iteration.

    Args:
        features: features of the rank.

    Attributes:
        native: the features for native code.
        count: number of features.
    """

    def __init__(self, features: Sequence[_Encoded]) -> None:
        self.native = _native.CodedFeatures(features)
        self.count = len(features)


class CodecPlan(NamedTuple):
    """The codecs of the lookups of each rank, [rank][feature] in the order of the lookups.

    Attributes:
        forward: codecs of embeddings; None if all of them travel as they are.
        backward: codecs of gradients; None if all of them travel as they are.
        decays: whether bounds depend on the iteration.
        unique: whether equal rows of a feature travel once; None if they do for no feature.
    """

    forward: list[list[CodedFeature]] | None
    backward: list[list[CodedFeature]] | None
    decays: bool
    unique: list[list[bool]] | None


def plan_codecs(config: CodecConfig, sharding: Any, is_weighted: bool = False) -> CodecPlan:
    """Returns the codecs of one of TorchRec's shardings.

    Args:
        config: configuration of the sharder.
        sharding: TorchRec's sharding with its tables and features.
        is_weighted: whether ids have weights. Then bags of equal ids have different rows.
    """
    tables = [
        [table for group in groups for table in group.embedding_tables for _ in table.feature_names]
        for groups in sharding._grouped_embedding_configs_per_rank
    ]
    unique = [[unique_of(config, table.name) for table in of_rank] for of_rank in tables]
    finds_unique = any(map(any, unique)) and not is_weighted

    def planned(codec_of: Callable[[CodecConfig, str], Any]) -> list[list[CodedFeature]] | None:
        by_rank = [
            [CodedFeature(codec_of(config, table.name), table.local_cols) for table in of_rank]
            for of_rank in tables
        ]
        coded = any(feature.codec != Codec.FP32 for of_rank in by_rank for feature in of_rank)
        return by_rank if coded or finds_unique else None

    return CodecPlan(
        planned(forward_of),
        planned(backward_of),
        has_decay(config),
        unique if finds_unique else None,
    )


def in_force(
    planned: list[list[CodedFeature]], iteration: int, addends: Sequence[int]
) -> list[EncodedFeatures]:
    """Returns the way in which features travel in an iteration, by rank.

    Args:
        planned: codecs of a CodecPlan.
        iteration: iteration of the training, counted from 0.
        addends: number of ranks whose rows are added up with each rank's rows, by rank.
    """

    def encoded(feature: CodedFeature, addends: int) -> _Encoded:
        codec, columns = feature
        if isinstance(codec, ErrorBound):
            bound = bound_at(codec, iteration, addends)
            return _native.ERROR_BOUNDED, columns, bound, codec.fixed_width
        return codec, columns, 0.0, False

    return [
        EncodedFeatures([encoded(feature, added) for feature in of_rank])
        for of_rank, added in zip(planned, addends, strict=True)
    ]
