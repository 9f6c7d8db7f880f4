"""Measures when a model's gradients are ready in a backward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_bls.overlap.agreement import raise_together
from torchrec_bls.overlap.measured.timed_backwards import TABLES, first_difference, time_backwards

#: Backwards that are timed, after one that is not.
LEAST_SAMPLES = 15
# A shorter part of the backward is no layer of its own. So there are at most so many layers.
_MOST_LAYERS = 200


@dataclass(frozen=True)
class DenseLayer:
    """Parameters whose gradients are ready at about the same time.

    Attributes:
        parameters: names of the parameters, in the order in which their gradients are ready.
        sizes: bytes of each parameter's gradient.
        compute_us: time of the backward between the layer before and this one, microseconds, each
            from when all ranks have its gradients. Each measured backward gives one number.
    """

    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    compute_us: tuple[float, ...]

    @property
    def bytes(self) -> int:
        """Returns the bytes of all its gradients."""
        return sum(self.sizes)


@dataclass(frozen=True)
class MeasuredBackward:
    """Backwards of a model, each followed by one all-reduce of all gradients.

    Attributes:
        layers: the model's layers, in the order in which their gradients are ready.
        reduced_us: microseconds of the all-reduce, from when all ranks have all gradients until all
            ranks have the averages. Each measured backward gives one number.
    """

    layers: tuple[DenseLayer, ...]
    reduced_us: tuple[float, ...]


def measure_layers(
    model: nn.Module, batches: Iterable[Any], group: dist.ProcessGroup
) -> MeasuredBackward:
    """Runs backwards on all ranks at once, each followed by an all-reduce of all gradients.

    Embedding tables are left out: their gradients take another way. The model stays as it was:
    parameters, gradients, buffers and random numbers.

    Args:
        model: model that is not sharded. Its result, or the first item of the result, is the loss;
            if that is no scalar, it is summed up.
        batches: batches for the model; a tuple has its arguments, anything else is its only one.
        group: group of all ranks that train together.

    Raises:
        ValueError: the model can't be planned for; the text says why and what to do.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("there are no batches: give one at least, of the size of the training's")
    parameters: dict[str, nn.Parameter] = {}
    error = None
    try:
        parameters = dense_parameters(model)
    except ValueError as refused:
        error = refused
    raise_together(error, group)
    _check_same_sizes(parameters, group)
    samples = max(LEAST_SAMPLES, len(batches))
    order, times = time_backwards(model, parameters, islice(cycle(batches), samples + 1), group)
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, (order, times), group)
    for rank, (other, _) in enumerate(of_ranks):
        if other != of_ranks[0][0]:
            raise ValueError(
                f"gradients are ready in another order on rank {rank} than on rank 0: "
                f"{first_difference(other, of_ranks[0][0])}. All ranks must run the same model"
            )
    # An all-reduce begins when the last rank has the gradients.
    ready = torch.tensor([own for _, own in of_ranks], dtype=torch.float64).amax(dim=0)
    *parts, reduced = ready.diff(dim=1, prepend=torch.zeros(len(ready), 1, dtype=ready.dtype)).T
    layers = _merged(order, parameters, [each.tolist() for each in parts])
    return MeasuredBackward(tuple(layers), tuple(reduced.tolist()))


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that DistributedDataParallel averages, by name.

    Raises:
        ValueError: there are none, or their gradients can't share buckets.
    """
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is in DistributedDataParallel already: plan before that")
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, TABLES)
        for parameter in module.parameters()
    }
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in tables
    }
    if not found:
        raise ValueError(
            "the model has no trainable parameter beside its embedding tables: there is nothing "
            "to plan"
        )
    kinds = {(parameter.dtype, parameter.device) for parameter in found.values()}
    if len(kinds) > 1:
        listed = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"the model has parameters of {listed}, whose gradients DistributedDataParallel never "
            "puts into one bucket: plans are for models of one type on one device"
        )
    device = next(iter(found.values())).device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the model is on '{device}', where no backward can be measured: plan on a CPU or GPU"
        )
    return found


def _check_same_sizes(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Compares the gradients' sizes between ranks, collectively: an all-reduce can't."""
    sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, sizes, group)
    for rank, others in enumerate(of_ranks):
        for name in sorted(of_ranks[0].keys() | others.keys()):
            there, here = others.get(name, 0), of_ranks[0].get(name, 0)
            if there != here:
                raise ValueError(
                    f"'{name}' has {there} bytes on rank {rank} and {here} on rank 0: all ranks "
                    "must run the same model"
                )


def _merged(
    order: Sequence[str], parameters: dict[str, nn.Parameter], times: Sequence[Sequence[float]]
) -> list[DenseLayer]:
    """Returns layers. `times` are by parameter.

    From the first gradient of a layer to that of the next one passes a two-hundredth of the
    backward at least. So a weight, which is ready right after its bias, stays with it.
    """
    samples = len(times[0])
    least = sum(map(sum, times)) / _MOST_LAYERS
    layers: list[DenseLayer] = []
    names: list[str] = []
    since, after_first = [0.0] * samples, 0.0
    for number, name in enumerate(order):
        after_first += sum(times[number])
        if names and after_first >= least:
            layers.append(_layer(names, parameters, since))
            names, since = [], [0.0] * samples
        if not names:
            after_first = 0.0
        names.append(name)
        since = [sum(each) for each in zip(since, times[number], strict=True)]
    return [*layers, _layer(names, parameters, since)]


def _layer(
    names: Sequence[str], parameters: dict[str, nn.Parameter], times: Sequence[float]
) -> DenseLayer:
    sizes = tuple(parameters[name].nbytes for name in names)
    return DenseLayer(tuple(names), sizes, tuple(times))
