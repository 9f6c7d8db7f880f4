"""Training steps of dense layers under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_bls.sharding.cost_interface import CostModel
from torchrec_bls.sharding.simulation.data_parallel import Bucket, DenseSteps

from benchmarks.simulator.dense.model import Gradient, LayerTimes
from torchrec_bls.overlap.search.defaults import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from torchrec_bls.rank_steps import Op, Work

_BACKEND = "gloo"


def dense_steps(
    layers: Sequence[LayerTimes],
    ranks: int,
    model: CostModel,
    *,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> DenseSteps:
    """Returns the steps of layers under DistributedDataParallel over gloo.

    A layer's gradients are ready when its backward is done, the last parameter's first.

    Args:
        layers: layers in the order of the forward.
        ranks: number of ranks of the job; a single rank has no buckets.
        model: model of all-reduces.
        first_bucket_bytes: size of DistributedDataParallel's first bucket.
        bucket_bytes: size of its other buckets, bucket_cap_mb in bytes.
    """
    gradients: list[Gradient] = []
    work: list[float] = []
    since = 0.0
    for layer in reversed(layers):
        since += layer.backward_us
        for gradient in reversed(layer.gradients):
            gradients.append(gradient)
            work.append(since)
            since = 0.0
    forward = sum(layer.forward_us for layer in layers)
    optimizer = sum(gradient.update_us for gradient in gradients)
    if ranks == 1:
        return DenseSteps(forward, (), sum(work) + since, optimizer)
    buckets = []
    sizes = [gradient.bytes for gradient in gradients]
    for numbers in buckets_of(sizes, first_bucket_bytes, bucket_bytes):
        ready = sum(work[number] + gradients[number].pack_us for number in numbers)
        reduced = sum(sizes[number] for number in numbers)
        unpack = sum(gradients[number].unpack_us for number in numbers)
        all_reduce = model.all_reduce(reduced, ranks, _BACKEND, 1.0)
        on_core = all_reduce.microseconds * all_reduce.on_core
        pause = all_reduce.microseconds - on_core
        buckets.append(Bucket(ready, on_core, unpack, pause))
    return DenseSteps(forward, tuple(buckets), since, optimizer)


def data_parallel_program(dense: DenseSteps, step_us: float = 0.0) -> list[Op]:
    """Returns a training step of dense layers alone.

    Args:
        dense: the layers.
        step_us: microseconds of everything else in a step, such as loading and Python.
    """
    return [
        Work(step_us, "load"),
        Work(dense.forward_us, "dense forward"),
        *dense.backward(),
        *dense.finish(),
    ]
