"""What is measured side by side: TorchRec on gloo, and our sharders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.demo.steps import Progress
from torchrec_bls import ChannelStats


@dataclass(frozen=True)
class Variant:
    """One way to shard the model and to drive it.

    Attributes:
        name: name of the variant's line in the table.
        bound: the bound k, or None where there is none: TorchRec on gloo, and direct reads.
        sharder: sharder for ``DistributedModelParallel``.
        start: function that makes a fresh pipeline over the sharded model.
        stats: function that reads the counters of the model's channels.
        close: function that gives back what the model holds.
    """

    name: str
    bound: int | None
    sharder: Any
    start: Callable[[DistributedModelParallel], Progress]
    stats: Callable[[DistributedModelParallel], list[ChannelStats]]
    close: Callable[[DistributedModelParallel], None]


def torchrec_on_gloo() -> Variant:
    """TorchRec's own sharders and forward: every other line is compared with this one."""
    return Variant(
        name="TorchRec on gloo",
        bound=None,
        sharder=EmbeddingBagCollectionSharder(),
        start=lambda model: lambda batches: model(next(batches)),
        stats=lambda model: [],
        close=lambda model: None,
    )
