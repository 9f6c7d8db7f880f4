"""The buckets of a backward that nobody planned."""

from __future__ import annotations

from collections.abc import Sequence

from ..simulation.data_parallel import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from .timeline import Group, Layer


def data_parallel(layers: Sequence[Layer]) -> list[Group]:
    """Returns torch's DistributedDataParallel by default: a first bucket of 1 MiB, others of 25."""
    return _buckets(layers, FIRST_BUCKET_BYTES, BUCKET_BYTES)


def torchrec_data_parallel(layers: Sequence[Layer]) -> list[Group]:
    """Returns TorchRec's wrapper by default: its bucket_cap_mb of 25 is the first bucket's too."""
    return _buckets(layers, BUCKET_BYTES, BUCKET_BYTES)


def _buckets(layers: Sequence[Layer], first: int, others: int) -> list[Group]:
    buckets = buckets_of([layer.bytes for layer in layers], first, others)
    return [Group(len(bucket)) for bucket in buckets]
