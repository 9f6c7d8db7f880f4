"""Buckets that nobody planned."""

from torchrec_bls.sharding.overlap.defaults import data_parallel, torchrec_data_parallel
from torchrec_bls.sharding.overlap.timeline import Layer

MIB = 2**20


def test_buckets_by_default() -> None:
    layers = [Layer(1.0, int(size * MIB)) for size in (0.5, 0.5, 20, 5, 3, 30, 2)]
    assert [group.layers for group in data_parallel(layers)] == [2, 2, 2, 1]
    # The first bucket has 25 MiB too.
    assert [group.layers for group in torchrec_data_parallel(layers)] == [4, 2, 1]
