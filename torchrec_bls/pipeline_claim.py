"""A pipeline's claim to a model, from its first step to `detach`."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from torchrec_bls.pipeline_stages import ModuleStages, RewrittenModel


class ModelClaim:
    """Keeps others from calling a pipeline's model and from loading weights into it.

    If the pipeline is collected, the model gets its own forwards back. Batches that are under way
    then are finished, without an output, at the next call of the model.

    Args:
        pipeline: pipeline to claim for. It is not kept alive.
        model: model of the pipeline.
        stages: stages of the modules that exchange.
        refuse_loading: method of the pipeline that raises where weights may not be loaded.

    Attributes:
        rewritten: the model, once the first batch has come.

    Raises:
        ValueError: the model belongs to another pipeline, or another thread is calling it.
    """

    def __init__(
        self,
        pipeline: Any,
        model: nn.Module,
        stages: Mapping[str, ModuleStages],
        refuse_loading: Callable[[], None],
    ) -> None:
        self.rewritten: RewrittenModel | None = None
        self._stages = list(stages.values())
        self._hooks: list[Any] = []
        try:
            for each in self._stages:
                each.module.callers.claim(pipeline)
        except BaseException:
            for each in self._stages:
                if each.module.callers.pipeline is pipeline:
                    each.module.callers.release()
            raise
        of_pipeline: Any = weakref.WeakMethod(refuse_loading)

        def check(*_: object) -> None:
            refuse = of_pipeline()
            if refuse is not None:
                refuse()

        # Parts of the model are loaded one by one, or alone.
        modules: list[Any] = list(model.modules())  # torch's method has no types
        self._hooks = [each.register_load_state_dict_pre_hook(check) for each in modules]
        self._finalizer = weakref.finalize(pipeline, self._let_go)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Gives the model back. Nothing is under way, or the exchange has failed."""
        self._finalizer.detach()
        for each in self._stages:
            each.forget()
        self._let_go()

    def _let_go(self) -> None:
        if self.rewritten is not None:
            self.rewritten.restore()
            self.rewritten = None
        for hook in self._hooks:
            hook.remove()
        for each in self._stages:
            each.module.callers.release(each.finish_all if each.under_way else None)


def refuse_claimed(stages: Iterable[ModuleStages]) -> None:
    """Raises ValueError if modules belong to another pipeline already."""
    for each in stages:
        if each.module.callers.pipeline is not None:
            raise ValueError(
                "the model belongs to another BoundedLagPipeline: drain() and detach() that one "
                "first"
            )
