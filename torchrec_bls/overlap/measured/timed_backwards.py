"""Times backwards of a model, and the all-reduce behind each."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

#: Modules whose gradients take another way.
TABLES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)


def time_backwards(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    batches: Iterable[Any],
    group: dist.ProcessGroup,
) -> tuple[list[str], list[list[float]]]:
    """Runs backwards on all ranks at once, each followed by an all-reduce of all gradients.

    Embedding tables are left out. The model stays as it was.

    Args:
        model: as `measure_layers`.
        parameters: the model's dense parameters by name, of the same sizes on all ranks.
        batches: batches; the first one's backward is not timed.
        group: group of all ranks.

    Returns:
        The names in the order of their gradients; and for each timed backward the microseconds
        from its begin until each of these gradients was there, and until the all-reduce was done.

    Raises:
        ValueError: a batch gives no loss, or gradients come in another order; on all ranks.
    """
    with _as_it_was(model, parameters), tables_cut_off(model):
        return _run(model, parameters, batches, group)


def _run(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    batches: Iterable[Any],
    group: dist.ProcessGroup,
) -> tuple[list[str], list[list[float]]]:
    ready: list[str] = []
    first = next(iter(parameters.values()))
    clock = Clock(first.device)
    sizes = [parameter.numel() for parameter in parameters.values()]
    bucket = first.new_empty(sum(sizes))
    places = dict(zip(parameters, torch.split(bucket, sizes), strict=True))

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            # As DistributedDataParallel does, which takes part of the backward's time.
            places[name].view_as(parameter).copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None
            clock.note()
            ready.append(name)

        return note

    hooks = [
        parameter.register_post_accumulate_grad_hook(noting(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
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
                loss = loss_of(model(*batch) if isinstance(batch, tuple) else model(batch))
            except ValueError as refused:
                error = error or refused
            raise_together(error, group)
            dist.barrier(group)  # begin together
            clock.begin()
            loss.backward()  # type: ignore[no-untyped-call]
            # As by default for a model of one bucket.
            bucket.mul_(1 / group.size())
            dist.all_reduce(bucket, group=group, async_op=True).wait()
            clock.note()
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


class Clock:
    """Moments of a backward, by the device that runs it.

    Args:
        device: the gradients' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def begin(self) -> None:
        """Begins a backward, when the device has nothing else to do."""
        self._moments.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
        self.note()

    def note(self) -> None:
        """Notes a moment."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def since_begin_us(self) -> list[float]:
        """Returns microseconds from the begin to each moment that was noted."""
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
            f"{number} {first_difference(names, order)}. Buckets can't be planned for it"
        )


def first_difference(names: Sequence[str], others: Sequence[str]) -> str:
    """Returns words for the first place in which two lists differ."""
    for name, other in zip(names, others, strict=False):
        if name != other:
            return f"'{name}' comes in place of '{other}'"
    return f"there are {len(names)} parameters in place of {len(others)}"


def loss_of(output: Any) -> torch.Tensor:
    """Returns the loss that is a model's output, or the first item of it, summed up.

    Raises:
        ValueError: there is none.
    """
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
def tables_cut_off(model: nn.Module) -> Iterator[None]:
    """Cuts the embedding tables of `model` off, and of copies that share them: no backward gets to
    them."""
    hooks = [
        module.register_forward_hook(lambda _, __, output: _with_gradient(output))
        for module in model.modules()
        if isinstance(module, TABLES)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
