"""Quantized all-reduce of gradients as a communication hook of DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from torchrec_bls.codecs.rows import Codec
from torchrec_bls.collective.quantized import check_groups, quantized_all_reduce
from torchrec_bls.overlap.bucket_thread import BucketThread

__all__ = ["QuantizedAllReduceState", "quantized_all_reduce_hook"]

# Number of values that share a scale: at 4 bits, scales are 6 % of a message.
_COLUMNS = 256


class QuantizedAllReduceState:
    """The settings of `quantized_all_reduce_hook`, and the rounding errors so far.

    ```python
    state = QuantizedAllReduceState(ddp, codec=Codec.UINT4)
    ddp.register_comm_hook(state, quantized_all_reduce_hook)
    ```

    A thread reduces gradients in buckets of DDP's choice, while the backward pass goes on. They
    travel from rank to rank with tag 0. Give each state its own group if there are several states,
    or if the training itself sends or receives from rank to rank.

    Values in a row share a scale: 256 values of a bucket, one after the other, across parameters
    and biases. In the paper, and in `benchmarks/quantized`, rows are the rows of each weight.

    The errors of compensation are this rank's own. Save `state_dict()` with the checkpoint of each
    rank; otherwise training goes on as if there had been no errors.

    Args:
        module: DDP module, or the module in it.
        codec: codec of the messages. In a ring four bits need compensation; two cost accuracy in
            any case (Quantized Collectives, table 3).
        algorithm, group_size: see `quantized_all_reduce`.
        error_compensation: whether the rounding error is added to the next gradient.
        group: group of the ranks; None: the default group. Its backend has to send and receive
            (gloo).

    Raises:
        ValueError: the ranks do not fit the algorithm, or compensation would have no effect (see
            `quantized_all_reduce`).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        codec: Codec = Codec.UINT8,
        algorithm: str = "ring",
        group_size: int = 8,
        error_compensation: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if algorithm == "recursive_doubling":
            # An error here is better than in the first backward pass.
            check_groups(dist.get_world_size(group), group_size, compensated=error_compensation)
        module = (
            module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        )
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._codec = codec
        self._algorithm = algorithm
        self._group_size = group_size
        self._group = group
        # Stored by parameter, since DDP makes its buckets again after the first iteration.
        self._errors: dict[str, torch.Tensor] | None = {} if error_compensation else None
        self._thread = BucketThread("torchrec_bls quantized all-reduce")

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's errors, to be saved with its checkpoint."""
        errors = self._errors or {}
        return {"errors": {name: error.clone() for name, error in errors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the errors of `state_dict`.

        Raises:
            ValueError: the errors are another model's, or there is no compensation.
        """
        errors: dict[str, torch.Tensor] = state["errors"]
        if errors and self._errors is None:
            raise ValueError("the state has errors, but error_compensation is off")
        shapes = {name: parameter.shape for parameter, name in self._names.items()}
        for name, error in errors.items():
            if shapes.get(name) != error.shape:
                raise ValueError(
                    f"the state has an error of shape {tuple(error.shape)} for parameter '{name}', "
                    f"but the model has {tuple(shapes[name]) if name in shapes else 'none'}"
                )
        if self._errors is not None:
            self._errors = {name: error.clone() for name, error in errors.items()}

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Returns the future of a bucket's averages."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        return self._thread.submit(buffer, lambda: self.average(buffer, parameters))

    def average(self, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Replaces gradients by the average of all ranks', in the calling thread.

        Args:
            buffer: gradients of `parameters`, one after the other, float32.
            parameters: parameters of the module.
        """
        group = self._group or dist.group.WORLD
        assert group is not None
        rows = _rows_of(buffer / group.size())
        error = None if self._errors is None else _rows_of(self._gather_errors(parameters))
        quantized_all_reduce(
            rows,
            group,
            codec=self._codec,
            algorithm=self._algorithm,
            error=error,
            group_size=self._group_size,
        )
        buffer.copy_(rows.view(-1)[: buffer.numel()])
        if error is not None:
            self._keep_errors(parameters, error.view(-1))

    def _gather_errors(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        assert self._errors is not None
        errors = self._errors
        return torch.cat(
            [
                errors.get(self._names[parameter], torch.zeros_like(parameter)).reshape(-1)
                for parameter in parameters
            ]
        )

    def _keep_errors(self, parameters: list[torch.Tensor], flat: torch.Tensor) -> None:
        assert self._errors is not None
        first = 0
        for parameter in parameters:
            last = first + parameter.numel()
            self._errors[self._names[parameter]] = flat[first:last].view(parameter.shape).clone()
            first = last


def quantized_all_reduce_hook(
    state: QuantizedAllReduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook`: averages gradients with quantized
    messages (Quantized Collectives, section 3.4)."""
    return state.reduce(bucket)


def _rows_of(flat: torch.Tensor) -> torch.Tensor:
    """Returns `flat` as rows. The last row is padded with its last value, which keeps its range."""
    rows = -(-flat.numel() // _COLUMNS)
    padded = flat.new_empty(rows * _COLUMNS)
    padded[: flat.numel()] = flat
    padded[flat.numel() :] = flat[-1]
    return padded.view(rows, _COLUMNS)
