"""Training steps of dense layers under DistributedDataParallel: every rank has a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchrec_bls.rank_steps import Begin, Exchange, Op, PlannedCollective, Wait, Work


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


def _gradients(number: int) -> Exchange:
    return Exchange(f"dense gradients {number}")
