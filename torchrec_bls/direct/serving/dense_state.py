"""The state of a model beside its tables: found by name, and loaded as `load_state_dict` does."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrec_bls.checkpoints import Rows
from torchrec_bls.direct.dense_weights import copied, is_plain
from torchrec_bls.direct.new_weights import check_is_dense, entry_of
from torchrec_bls.errors import ProtocolError

# Entries of a state dict by name. Most are tensors, and some are what modules make of theirs.
State = Mapping[str, Any]


class _Part(NamedTuple):
    """A module whose state is loaded in one piece.

    Attributes:
        prefix: prefix of its names.
        module: the module.
        is_whole: whether its children belong to it. Otherwise one of them reads tables, and they
            are parts of their own.
    """

    prefix: str
    module: nn.Module
    is_whole: bool


class DenseState:
    """The state of a model without the modules that read tables.

    Nothing is remembered of its tensors: they may be replaced at any time.

    Args:
        model: the model, without wrappers.
        reading: modules in it that read tables.
    """

    def __init__(self, model: nn.Module, reading: Iterable[Any]) -> None:
        self._model = model
        self._reading = {id(module) for module in reading}
        self._above = {
            id(module)
            for module in model.modules()
            if any(id(each) in self._reading for each in module.modules())
        }

    def current(self) -> dict[str, Any]:
        """Returns the state by its names in `model.state_dict()`. Tensors are the model's own."""
        state: dict[str, Any] = {}
        for part in self._parts():
            state.update(_state_of(part))
        return state

    def copy(self) -> dict[str, Any]:
        """Returns a copy of the state.

        Raises:
            ValueError: see `encoded`.
        """
        return copied(self.current())

    def mark(self) -> dict[str, tuple[int, int]]:
        """Returns what changes when a tensor is written to, as far as torch counts, or replaced."""
        return {
            name: (value.data_ptr(), 0 if value.is_inference() else value._version)
            for name, value in self.current().items()
            if is_plain(name, value)
        }

    def new(self, state_dict: State) -> dict[str, Any]:
        """Returns a copy of a new state.

        Args:
            state_dict: state dict of a model like this one.

        Raises:
            ValueError: an entry is missing or of another kind, shape or dtype; can't be handed to
                another process; or its module refuses to load it.
        """
        live = self.current()
        given = {name: _in_memory(entry_of(state_dict, name)) for name in live}
        for name, value in live.items():
            new = given[name]
            if is_plain(name, value):
                check_is_dense(name, new)
                if (new.shape, new.dtype) != (value.shape, value.dtype):
                    raise ValueError(
                        f"'{name}' has shape {list(new.shape)} and {new.dtype}, but the model's "
                        f"has {list(value.shape)} and {value.dtype}"
                    )
            elif type(new) is not type(value):
                raise ValueError(
                    f"'{name}' is a {type(new).__name__}, but the model's a {type(value).__name__}"
                )
        new_state = copied(given)
        self._try(new_state)
        return new_state

    def check(self, given: State, where: str) -> None:
        """Raises ProtocolError if a state that another process gives is of another model.

        Args:
            given: state by name.
            where: source of the state, for messages.
        """
        live = self.current()
        if live.keys() != given.keys():
            raise ProtocolError(
                f"{where} has dense weights of another model: "
                f"{sorted(given.keys() - live.keys())} are not in this one, and "
                f"{sorted(live.keys() - given.keys())} are here alone"
            )
        for name, value in live.items():
            new = given[name]
            if is_plain(name, value) and (
                not isinstance(new, torch.Tensor)
                or (new.shape, new.dtype) != (value.shape, value.dtype)
            ):
                raise ProtocolError(
                    f"'{name}' of {where} {_shown(new)}, but this model's {_shown(value)}"
                )

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Gives the model a whole state. Parameters and buffers keep their identity.

        Raises:
            Exception: a module's own, if it refuses its part.
        """
        for part in self._parts():
            _load(part, state)

    def _parts(self) -> Iterator[_Part]:
        yield from self._parts_below("", self._model)

    def _parts_below(self, prefix: str, module: nn.Module) -> Iterator[_Part]:
        if id(module) in self._reading:
            return
        is_whole = id(module) not in self._above
        yield _Part(prefix, module, is_whole)
        if not is_whole:
            for name, child in module._modules.items():
                if child is not None:
                    yield from self._parts_below(f"{prefix}{name}.", child)

    def _try(self, state: State) -> None:
        """Loads into copies what modules make of their state: whether they take it, they alone
        know."""
        for part in self._parts():
            made = [name for name, value in _state_of(part).items() if not is_plain(name, value)]
            if not made:
                continue
            try:
                _load(part._replace(module=_copy_of(part)), state)
            except Exception as error:
                raise ValueError(
                    f"{made} can't be switched: '{part.prefix}' refuses them: {error}"
                ) from error


def _copy_of(part: _Part) -> nn.Module:
    if part.is_whole:
        return copy.deepcopy(part.module)
    alone = copy.copy(part.module)  # its children may be tables, and are not loaded
    alone.__dict__ = {
        name: value
        if name == "_modules" or name.startswith("_bls") or name.endswith("_hooks")
        else copy.deepcopy(value)
        for name, value in part.module.__dict__.items()
    }
    return alone


def _state_of(part: _Part) -> dict[str, Any]:
    if part.is_whole:
        return dict(part.module.state_dict(prefix=part.prefix))
    state: dict[str, Any] = OrderedDict()
    part.module._save_to_state_dict(state, part.prefix, keep_vars=False)
    return state


def _load(part: _Part, state: State) -> None:
    own = _state_of(part)
    given = OrderedDict((name, state[name]) for name in own)
    _restore_dtypes(part, given)
    if part.is_whole:
        start = len(part.prefix)
        stripped: Any = OrderedDict((name[start:], value) for name, value in given.items())
        # The versions of the modules' states: those of the code that made it, which is the same.
        stripped._metadata = part.module.state_dict()._metadata  # type: ignore[attr-defined]
        part.module.load_state_dict(stripped)
        return
    errors: list[str] = []
    part.module._load_from_state_dict(
        given, part.prefix, {"version": part.module._version}, True, [], [], errors
    )
    if errors:
        raise RuntimeError("; ".join(errors))


def _restore_dtypes(part: _Part, given: State) -> None:
    """Undoes a `half()` since the state was made: it would round the new values."""
    recurse = part.is_whole
    for tensors in (
        part.module.named_parameters(part.prefix[:-1], recurse),
        part.module.named_buffers(part.prefix[:-1], recurse),
    ):
        for name, tensor in tensors:
            new = given.get(name)
            if isinstance(new, torch.Tensor) and new.dtype != tensor.dtype and is_plain(name, new):
                tensor.data = tensor.data.to(new.dtype)


def _in_memory(entry: Any) -> Any:
    return entry.whole() if isinstance(entry, Rows) else entry


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"has shape {list(value.shape)} and {value.dtype}"
    return f"is a {type(value).__name__}"
