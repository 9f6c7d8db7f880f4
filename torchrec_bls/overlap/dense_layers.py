"""Measures when a model's gradients are ready in a backward."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_bls.overlap.agreement import raise_together

#: Backwards that are timed, after one that is not.
LEAST_SAMPLES = 15
# A shorter part of the backward is no layer of its own. So there are at most so many layers.
_MOST_LAYERS = 200
_TABLES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)


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


def measure_layers(
    model: nn.Module, batches: Iterable[Any], group: dist.ProcessGroup
) -> list[DenseLayer]:
    """Runs backwards on all ranks at once, and returns the layers in the order of their gradients.

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
    samples = max(LEAST_SAMPLES, len(batches))
    with _as_it_was(model, parameters):
        order, times = _run(model, parameters, islice(cycle(batches), samples + 1), group)
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, (order, times), group)
    for rank, (other, _) in enumerate(of_ranks):
        if other != of_ranks[0][0]:
            raise ValueError(
                f"gradients are ready in another order on rank {rank} than on rank 0: "
                f"{_first_difference(other, of_ranks[0][0])}. All ranks must run the same model"
            )
    # An all-reduce begins when the last rank has the gradients.
    ready = torch.tensor([own for _, own in of_ranks], dtype=torch.float64).amax(dim=0)
    parts = ready.diff(dim=1, prepend=torch.zeros(len(ready), 1, dtype=torch.float64))
    return _merged(order, parameters, parts.T.tolist())


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
        if isinstance(module, _TABLES)
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


def _run(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    batches: Iterator[Any],
    group: dist.ProcessGroup,
) -> tuple[list[str], list[list[float]]]:
    """Returns names in the order of their gradients, and microseconds by sample, in that order."""
    ready: list[str] = []
    clock = _Clock(next(iter(parameters.values())).device)
    bucket = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            # As DistributedDataParallel does, which takes part of the backward's time.
            bucket[name].copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None
            clock.note()
            ready.append(name)

        return note

    hooks = [
        parameter.register_post_accumulate_grad_hook(noting(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    hooks += [
        module.register_forward_hook(lambda _, __, output: _with_gradient(output))
        for module in model.modules()
        if isinstance(module, _TABLES)
    ]
    order: list[str] = []
    times: list[list[float]] = []
    error: ValueError | None = None
    loss = torch.empty(0)
    try:
        for number, batch in enumerate(batches):
            ready.clear()
            for parameter in parameters.values():
                parameter.grad = None
            try:
                loss = _loss(model(*batch) if isinstance(batch, tuple) else model(batch))
            except ValueError as refused:
                error = error or refused
            raise_together(error, group)  # and begin together
            clock.begin()
            loss.backward()  # type: ignore[no-untyped-call]
            try:
                _check_order(number, ready, order or ready, parameters)
            except ValueError as refused:
                error = refused
            order = list(ready)
            if number:
                times.append(clock.since_begin_us())
        raise_together(error, group)
    finally:
        for hook in hooks:
            hook.remove()
    return order, times


class _Clock:
    """Moments of a backward, by the device that runs it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def begin(self) -> None:
        self._moments.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
        self.note()

    def note(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def since_begin_us(self) -> list[float]:
        first, *others = self._moments
        if self._on_gpu:
            torch.cuda.synchronize()
            return [1e3 * first.elapsed_time(each) for each in others]
        return [1e6 * (each - first) for each in others]


def _check_order(
    number: int, names: list[str], order: list[str], parameters: dict[str, nn.Parameter]
) -> None:
    if len(names) != len(parameters):
        unused = sorted(set(parameters) - set(names))
        raise ValueError(
            f"batch {number} gives no gradient to {unused or 'some parameters, others got several'}"
            ": plans need every parameter in every step; freeze those that are not used "
            "(requires_grad_(False)), or train without a plan"
        )
    if names != order:
        raise ValueError(
            f"the order in which gradients are ready changes from batch to batch: in batch "
            f"{number} {_first_difference(names, order)}. Buckets can't be planned for it"
        )


def _first_difference(names: Sequence[str], others: Sequence[str]) -> str:
    for name, other in zip(names, others, strict=False):
        if name != other:
            return f"'{name}' comes in place of '{other}'"
    return f"there are {len(names)} parameters in place of {len(others)}"


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        raise ValueError(
            f"the model returns a {type(output).__name__} that no gradient can be taken of: plan "
            "with a module that returns its loss, or a tuple that begins with it"
        )
    return output.sum()


def _with_gradient(output: Any) -> Any:
    """Cuts tables off, and lets the layers behind them still compute their inputs' gradients."""
    if isinstance(output, KeyedTensor):
        values = output.values().detach().requires_grad_()
        return KeyedTensor(output.keys(), output.length_per_key(), values)
    return {
        name: JaggedTensor(
            each.values().detach().requires_grad_(), lengths=each.lengths(), offsets=each.offsets()
        )
        for name, each in output.items()
    }


@contextmanager
def _as_it_was(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters.values()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


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
    sizes = tuple(parameters[name].numel() * parameters[name].element_size() for name in names)
    return DenseLayer(tuple(names), sizes, tuple(times))
