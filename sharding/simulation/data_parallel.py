"""Training steps of dense layers under DistributedDataParallel: every rank has a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchrec_bls.rank_steps import Begin, Exchange, Op, PlannedCollective, Wait, Work

from ..cost_interface import CostModel, Gradient, LayerTimes

#: Of torch's DistributedDataParallel, by default.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
_BACKEND = "gloo"


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


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, microseconds.

    Attributes:
        work_us: microseconds of the backward until the gradients are ready and in the bucket.
        all_reduce_us: microseconds of the bucket's all-reduce on a core.
        unpack_us: microseconds of the copies back.
        pause_us: microseconds of the all-reduce on no core.
    """

    work_us: float
    all_reduce_us: float
    unpack_us: float
    pause_us: float = 0.0


@dataclass(frozen=True)
class DenseSteps:
    """A training step of layers that all ranks have, in microseconds; all 0 by default.

    Attributes:
        forward_us: time of the forward of all layers.
        buckets: buckets in the order in which the backward fills them.
        rest_us: time of the backward after the last gradient.
        optimizer_us: time of the update of all parameters.
    """

    forward_us: float = 0.0
    buckets: tuple[Bucket, ...] = ()
    rest_us: float = 0.0
    optimizer_us: float = 0.0

    @classmethod
    def of(
        cls,
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
            return cls(forward, (), sum(work) + since, optimizer)
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
        return cls(forward, tuple(buckets), since, optimizer)

    def backward(self) -> Iterator[Op]:
        """Yields the backward, which hands each full bucket to the communication thread."""
        for number, bucket in enumerate(self.buckets):
            yield Work(bucket.work_us, "dense backward")
            all_reduce = PlannedCollective(bucket.all_reduce_us, bucket.pause_us)
            yield Begin(_gradients(number), all_reduce, 0.0, bucket.unpack_us)
        if self.rest_us:
            yield Work(self.rest_us, "dense backward")

    def finish(self) -> Iterator[Op]:
        """Yields the ops after the whole backward: waiting for all buckets, and the optimizer."""
        for number in range(len(self.buckets)):
            yield Wait(_gradients(number))
        if self.optimizer_us:
            yield Work(self.optimizer_us, "optimizer")


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


def _gradients(number: int) -> Exchange:
    return Exchange(f"dense gradients {number}")
