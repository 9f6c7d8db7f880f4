"""The forwards of sharded models, each of which is a scope of the modules that exchange.

docs/design/forwards.md says what a scope is for.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_bls.collective.scope import Scope
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.module_owner import owner_of


def forward(*models: nn.Module) -> AbstractContextManager[object]:
    """Makes one forward of all calls in a `with` statement, also of several models.

    If the statement ends early on this rank by an exception, the rank first takes part, without
    samples, in the calls that the other ranks still make in it. So they get their rows. Under
    autograd they raise BatchRefusedError instead. A model that DistributedModelParallel wraps does
    this by itself in each of its forwards. Several models need it where one's output is the
    other's input::

        with torchrec_bls.forward(retrieval, ranking):
            answer = ranking(retrieval(batch))

    Args:
        models: sharded models, or parts of them. All ranks name the same.

    Raises:
        ValueError: a model has no module that was sharded by a sharder of this package. Where the
            statement begins: another thread is in a forward of one of the models.
    """
    found = [_modules_of(model) for model in models]
    if not found or not all(found):
        raise ValueError(
            "forward takes models with modules that were sharded by torchrec_bls's sharders: give "
            "these to DistributedModelParallel"
        )
    for model, modules in zip(models, found, strict=True):
        _set_owners(model, modules)
    return Scope(dict.fromkeys(module for modules in found for module in modules))


class _ModelHooks:
    """The hooks of a model, while it has modules that exchange. It keeps no module alive."""

    def __init__(self, model: nn.Module, modules: Sequence[BoundedLagModule]) -> None:
        self._model = weakref.ref(model)
        self._modules = [weakref.ref(module) for module in modules]
        self._handles: list[Any] = []
        _set_owners(model, modules)
        for module in modules:
            module.on_new_choice(self.add)
        self.add()

    def add(self) -> None:
        """Adds the hooks unless they are there."""
        model = self._model()
        if model is not None and not self._handles:
            self._handles = add_hooks(model, self._open_scope)

    def _open_scope(self, owner: object) -> Scope:
        modules = []
        for each in self._modules:
            if (module := each()) is not None:
                modules.append(module)
        scope = Scope(modules, owner).__enter__()
        if not scope.modules and all(module.reads_directly for module in modules):
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()
        return scope


def add_hooks(model: nn.Module, open_scope: Callable[[object], Scope]) -> list[Any]:
    """Makes each forward of `model` a scope. torch.compile breaks its graph there.

    Args:
        model: model to add hooks to.
        open_scope: function that opens a scope for the owner that it gets.

    Returns:
        The handles of the hooks.
    """
    scopes: dict[int, Scope] = {}  # by thread, which another one may not end

    def begin(*_: object) -> None:
        # Asked first: a disabled function costs microseconds even without a compiler.
        if is_compiling():
            begin_untraced()
        else:
            scopes[get_ident()] = open_scope(scopes)

    def end(model: nn.Module, inputs: object, result: object) -> None:
        if is_compiling():
            end_untraced(model, inputs, result)
            return
        # torch calls it without a result while it handles the exception of a forward.
        error = sys.exc_info()[1] if result is None else None
        scope = scopes.pop(get_ident(), None)
        if scope is not None:
            scope.__exit__(None, error, None)

    begin_untraced: Any = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
    end_untraced: Any = torch.compiler.disable(end)  # type: ignore[no-untyped-call]
    return [
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end, always_call=True),
    ]


def _modules_of(model: nn.Module) -> list[BoundedLagModule]:
    return [module for module in model.modules() if isinstance(module, BoundedLagModule)]


def _set_owners(model: nn.Module, modules: Iterable[BoundedLagModule]) -> None:
    for module in modules:
        module.set_owner(owner_of(module, model))


@cache
def add_hooks_to_models() -> None:
    """Makes every DistributedModelParallel add hooks to its model. Sharders do not see the model
    that their modules are a part of."""
    theirs = DistributedModelParallel.__init__

    @wraps(theirs)
    def with_hooks(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        modules = _modules_of(self.module)
        if modules:
            _ModelHooks(self.module, modules)

    DistributedModelParallel.__init__ = with_hooks
