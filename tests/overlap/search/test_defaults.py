"""Buckets that nobody planned, beside those of torch."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.simulator.dense.layers import dense_ops
from tests.processes import run
from torchrec_bls.overlap.search.defaults import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    buckets_of,
    data_parallel,
    torchrec_data_parallel,
)
from torchrec_bls.overlap.search.timeline import Layer

MIB = 2**20


def test_buckets_by_default() -> None:
    layers = [Layer(1.0, int(size * MIB)) for size in (0.5, 0.5, 20, 5, 3, 30, 2)]
    assert [group.layers for group in data_parallel(layers)] == [2, 2, 2, 1]
    # The first bucket has 25 MiB too.
    assert [group.layers for group in torchrec_data_parallel(layers)] == [4, 2, 1]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 200)
)
def test_buckets_are_those_of_torch(elements: list[int], first: int, others: int) -> None:
    ready = list(range(len(elements)))
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(count) for count in elements], [first, others], [], ready
    )
    assert buckets_of([4 * count for count in elements], first, others) == list(theirs)


def test_sizes_are_by_default_those_of_torch() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES
    assert torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * 2**20 == BUCKET_BYTES


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(192, 4, 768, activation="gelu")
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


_SHAPE = (4, 2, 192)


def _bucket_sizes(rank: int, caps: list[int | None]) -> list[list[int]]:
    """Returns the bytes of the buckets that DDP has after its first steps, by size in MiB."""
    found = []
    for cap in caps:
        model = DistributedDataParallel(_model(), bucket_cap_mb=cap)
        for _ in range(3):
            model(torch.randn(_SHAPE)).sum().backward()
        text = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        found.append([int(size) for size in text.split(", ")])
    return found


def test_buckets_are_those_of_a_real_step() -> None:
    default, two = run(2, _bucket_sizes, [None, 2])[0]
    ops = dense_ops(_model(), _SHAPE)
    ready = [size for op in reversed(ops) for size in reversed(op.gradient_bytes)]

    def sizes(*limits: int) -> list[int]:
        return [sum(ready[i] for i in bucket) for bucket in buckets_of(ready, *limits)]

    assert default == sizes()
    assert len(default) == 2
    # A size of one's own is the first bucket's too.
    assert two == sizes(2 << 20, 2 << 20)
    assert len(two) > 2


def test_the_last_gradient_fills_no_bucket() -> None:
    sizes = [FIRST_BUCKET_BYTES, 10, 20]
    assert buckets_of(sizes) == [[0], [1, 2]]
    assert buckets_of([]) == []
    assert list(accumulate(map(len, buckets_of([1] * 5, 2, 2)))) == [2, 4, 5]
