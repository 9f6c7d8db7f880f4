"""The buckets of a backward that nobody planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec_bls.overlap.search.timeline import Group, Layer

#: Of torch's DistributedDataParallel, by default.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def data_parallel(layers: Sequence[Layer]) -> list[Group]:
    """Returns torch's DistributedDataParallel by default: a first bucket of 1 MiB, others of 25."""
    return _buckets(layers, FIRST_BUCKET_BYTES, BUCKET_BYTES)


def torchrec_data_parallel(layers: Sequence[Layer]) -> list[Group]:
    """Returns TorchRec's wrapper by default: its bucket_cap_mb of 25 is the first bucket's too."""
    return _buckets(layers, BUCKET_BYTES, BUCKET_BYTES)


def buckets_of(
    gradient_bytes: Iterable[int], first: int = FIRST_BUCKET_BYTES, others: int = BUCKET_BYTES
) -> list[list[int]]:
    """Returns which gradients travel together, by the rule of torch's reducer.

    A bucket is full with the gradient by which it reaches its size. The reducer follows this rule
    after its first step, which shows it the order in which gradients become ready.

    Args:
        gradient_bytes: bytes of gradients of one type, in the order in which they become ready.
        first: size of the first bucket.
        others: size of the other buckets.

    Returns:
        The buckets, each with the numbers of its gradients.
    """
    buckets: list[list[int]] = [[]]
    filled, limit = 0, first
    for number, size in enumerate(gradient_bytes):
        buckets[-1].append(number)
        filled += size
        if filled >= limit:
            buckets.append([])
            filled, limit = 0, others
    return [bucket for bucket in buckets if bucket]


def _buckets(layers: Sequence[Layer], first: int, others: int) -> list[Group]:
    buckets = buckets_of([layer.bytes for layer in layers], first, others)
    return [Group(len(bucket)) for bucket in buckets]
