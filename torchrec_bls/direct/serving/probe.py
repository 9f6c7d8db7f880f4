"""What a new version of a model has to pass before it is announced."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.reading_modules import ReadingModule
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import named

#: A lower or upper bound of an answer: a number, or a tensor that broadcasts to the answer.
Bound = float | torch.Tensor
#: A function of the model that raises what is wrong; or requests: the arguments of a call of the
#: model, and bounds of all numbers that it returns.
Probe = Callable[[nn.Module], object] | Sequence[tuple[Sequence[Any], Bound, Bound]]


def check_is_probe(probe: Any) -> None:
    """Raises ValueError unless `probe` is a function, or requests with bounds."""
    if callable(probe):
        return
    if not isinstance(probe, Sequence) or not probe:
        raise ValueError(
            f"probe is {probe!r}, but must be a function of the model, or a list of requests with "
            "bounds: [((batch,), 0.0, 1.0)]"
        )
    for number, request in enumerate(probe):
        fits = isinstance(request, Sequence) and len(request) == 3
        if not fits or not isinstance(request[0], Sequence):
            raise ValueError(
                f"request {number} of the probe is a {type(request).__name__}, but must be the "
                "arguments of a call and two bounds: ((batch,), 0.0, 1.0)"
            )


class Trial:
    """Calls a copy of a model that reads a version which nobody knows yet.

    What the model serves stays as it is: the copy has tables, dense state and counts of its own.

    Args:
        model: the model, without wrappers.
        modules: modules in it that read tables, by name.
        served: owner of the model's hooks that switch versions, which are not the copy's.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, ReadingModule], served: object
    ) -> None:
        self._model = model
        self._modules = dict(modules)
        self._served = served

    @outside_inference_mode
    @torch.no_grad()
    def check(
        self,
        probe: Probe,
        version: str,
        generations: Sequence[Generation],
        dense: Mapping[str, Any],
    ) -> None:
        """Raises ValueError if a version does not pass. Its text says which answer is out of which
        bounds, and its cause is what a call has raised.

        Args:
            probe: see Probe.
            version: name of the version.
            generations: its tables, of each module.
            dense: its dense state.
        """
        try:
            twin = self._twin(generations, dense)
        except Exception as error:
            raise ValueError(
                f"version {version!r} can't be probed, since the model can't be copied: "
                f"{named(error)}"
            ) from error
        calls: dict[str, Callable[[], None]]
        if callable(probe):
            calls = {"its probe": partial(_call, probe, twin)}
        else:
            calls = {
                f"request {number} of its probe": partial(_ask, twin, *request)
                for number, request in enumerate(probe)
            }
        for what, call in calls.items():
            try:
                call()
                _wait_checked(twin)
            except Exception as error:
                says = str(error) if isinstance(error, _OutOfBoundsError) else named(error)
                raise ValueError(
                    f"version {version!r} is not published, since {what} does not pass: {says}"
                ) from error

    def _twin(self, generations: Sequence[Generation], dense: Mapping[str, Any]) -> nn.Module:
        nobody = object()
        memo: dict[int, Any] = {id(self._served): nobody}
        readers = []
        for module, generation in zip(self._modules.values(), generations, strict=True):
            reads = module.direct_reads
            assert reads is not None
            check = copy.copy(module.input_check)
            check.begin_in_child()
            reader = AttachedCollection(reads.aside(generation, check), check)
            memo[id(module)] = reader.train(cast("nn.Module", module).training)
            readers.append(reader)
        twin: nn.Module = copy.deepcopy(self._model, memo)
        for name, value in list(twin.__dict__.items()):
            if value is nobody:
                del twin.__dict__[name]
        for hooks in (twin._forward_pre_hooks, twin._forward_hooks):
            for number, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is nobody:
                    del hooks[number]
        DenseState(twin, readers).load(dense)
        return twin


class _OutOfBoundsError(ValueError):
    """An answer is out of its bounds."""


def _wait_checked(twin: nn.Module) -> None:
    """Raises ValueError if a GPU finds a bad id in the batches of a probe."""
    for module in twin.modules():
        if isinstance(module, AttachedCollection):
            module.wait_checked()


def _call(probe: Callable[[nn.Module], object], twin: nn.Module) -> None:
    if probe(twin) is False:
        raise _OutOfBoundsError("it returned False")


def _ask(twin: nn.Module, arguments: Sequence[Any], low: Bound, high: Bound) -> None:
    answers = list(_tensors_in(twin(*arguments), "the answer"))
    if not answers:
        raise _OutOfBoundsError("it has no tensors in its answer: give a function as the probe")
    for name, answer in answers:
        below, above = (torch.as_tensor(each).expand(answer.shape) for each in (low, high))
        outside = ~((answer >= below) & (answer <= above))  # NaN is
        if outside.any():
            place = tuple(outside.nonzero()[0].tolist())
            raise _OutOfBoundsError(
                f"{answer[place].item()} at {list(place)} of {name} is not between "
                f"{below[place].item()} and {above[place].item()} ({int(outside.sum())} of "
                f"{answer.numel()} are not)"
            )


def _tensors_in(answer: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(answer, torch.Tensor):
        yield name, answer
    elif isinstance(answer, (KeyedTensor, JaggedTensor)):
        yield name, answer.values()
    elif isinstance(answer, Mapping):
        for key, each in answer.items():
            yield from _tensors_in(each, f"{name}[{key!r}]")
    elif isinstance(answer, (list, tuple)):
        for number, each in enumerate(answer):
            yield from _tensors_in(each, f"{name}[{number}]")
