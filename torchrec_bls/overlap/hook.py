"""Runs a plan: reduces each bucket of DistributedDataParallel in the planned way."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from torchrec_bls.codecs.rows import Codec
from torchrec_bls.overlap.bucket_thread import BucketThread
from torchrec_bls.overlap.quantized_hook import QuantizedAllReduceState

# DistributedDataParallel makes its buckets again in one of the first steps; for static graphs in
# the third step.
_STEPS_WITH_OTHER_BUCKETS = 4


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that travel together.

    Attributes:
        parameters: names of the parameters, in the order in which their gradients are ready.
        bytes: size of all these gradients.
        mode: form in which they travel: "float32", or the name of a codec.
    """

    parameters: tuple[str, ...]
    bytes: int
    mode: str


class PlannedAllReduce:
    """State of `planned_all_reduce_hook`: one thread that reduces buckets in sequence.

    Buckets are known by their parameters. A bucket that the plan does not have travels at once and
    as float32. Such buckets come in the first steps, before DistributedDataParallel knows the order
    of gradients.

    Args:
        module: module inside DistributedDataParallel.
        buckets: planned buckets.
        group: group of the ranks, used only for this.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[PlannedBucket], group: dist.ProcessGroup
    ) -> None:
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self._group = group
        self._thread = BucketThread("torchrec_bls planned all-reduce")
        self._buckets = {frozenset(bucket.parameters): bucket for bucket in buckets}
        self._quantized = {
            mode: QuantizedAllReduceState(module, codec=Codec[mode.upper()], group=group)
            for mode in {bucket.mode for bucket in buckets} - {"float32"}
        }
        self._steps = 0
        self._warned = False

    def reduce(self, bucket: GradBucket) -> "Future[torch.Tensor]":
        """Returns the future of a bucket's averages."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        planned = self._buckets.get(frozenset(self._names[each] for each in parameters))
        if planned is None:
            self._warn_of(bucket)
        if bucket.is_last():
            self._steps += 1
        mode = "float32" if planned is None else planned.mode
        label = f"torchrec_bls bucket {bucket.index()}, {mode}"

        def average() -> None:
            with record_function(label):
                if mode == "float32":
                    # This is what DistributedDataParallel does without a hook.
                    buffer.mul_(1 / self._group.size())
                    dist.all_reduce(buffer, group=self._group)
                else:
                    self._quantized[mode].average(buffer, parameters)

        return self._thread.submit(buffer, average)

    def _warn_of(self, bucket: GradBucket) -> None:
        if self._steps < _STEPS_WITH_OTHER_BUCKETS or self._warned:
            return
        self._warned = True
        names = [self._names[each] for each in bucket.parameters()]
        warnings.warn(
            f"rank {self._group.rank()}: no bucket of the plan has '{names[0]}' to '{names[-1]}', "
            f"which travel together in step {self._steps}: gradients are ready in another order "
            "than when the plan was made. It is trained on without the plan; make it anew",
            stacklevel=2,
        )


def planned_all_reduce_hook(
    state: PlannedAllReduce, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook`: averages gradients by a plan."""
    return state.reduce(bucket)
