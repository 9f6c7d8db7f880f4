"""The stages of one embedding module in a pipeline, and the way a model's forward uses them."""

from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.train_pipeline.utils import _rewrite_model
from torchrec.distributed.types import LazyAwaitable

from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.input_dist import IdsLayout, first_layout
from torchrec_bls.distributed.inputs.kept_features import kept


class ModelCall:
    """The call of a model that its pipeline is making.

    Attributes:
        thread: identity of the thread that makes it; None between calls.
        iteration: iteration that it is about.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.iteration: object = None


class ModuleStages:
    """One embedding module's batches that are under way.

    Args:
        module: module that exchanges.
        owner: module that the model calls: `module` itself, or one of TorchRec's around it.
        call: the pipeline's call of the model.
    """

    def __init__(self, module: BoundedLagModule, owner: Any, call: ModelCall) -> None:
        self.module = module
        self.owner = owner
        self.call = call
        # Each batch is one iteration of the pipeline, which is known by its object.
        self._ids: deque[tuple[object, Any, Any]] = deque()
        self._embeddings: deque[tuple[object, Any]] = deque()

    def post_ids(self, iteration: object, batch: CheckedBatch, note: IdsNote) -> None:
        """Posts the ids of a batch, and `note` to every rank."""
        context = self.owner.create_context()
        self._ids.append((iteration, context, self.module.post(context, batch, note)))

    def look_up(self) -> IdsLayout | None:
        """Waits for the ids of the oldest batch, looks them up and posts the embeddings. Returns
        the layout with the other ranks' notes; None if no ids were sent."""
        iteration, context, awaitable = self._ids.popleft()
        ids = awaitable.wait().wait()
        self._embeddings.append((iteration, self.owner.compute_and_output_dist(context, ids)))
        return first_layout(context)

    def take(self, iteration: object) -> LazyAwaitable[Any] | None:
        """Returns the embeddings of an iteration; None if they were taken already."""
        if self._embeddings and self._embeddings[0][0] is iteration:
            embeddings: LazyAwaitable[Any] = self._embeddings.popleft()[1]
            return embeddings
        return None

    def end(self, iteration: object) -> None:
        """Completes the exchange of an iteration's embeddings if nobody has asked for them."""
        embeddings = self.take(iteration)
        if embeddings is not None:
            embeddings.wait()

    def finish_all(self) -> None:
        """Completes the exchanges of all batches under way."""
        with torch.no_grad():
            while self._ids:
                self.look_up()
            while self._embeddings:
                self._embeddings.popleft()[1].wait()

    def forget(self) -> None:
        """Drops the batches under way, whose exchanges have failed."""
        self._ids.clear()
        self._embeddings.clear()

    @property
    def under_way(self) -> int:
        """Returns the number of batches under way."""
        return len(self._ids) + len(self._embeddings)


class ReadStages(ModuleStages):
    """The batches of a module that reads tables directly, beside modules that exchange.

    Nothing is posted. Rows are read when the model is called, and are of one version with the dense
    weights. Until then this keeps a copy of the batch, whose memory is the caller's.
    """

    def post_ids(self, iteration: object, batch: CheckedBatch, note: IdsNote) -> None:
        """Copies the ids of a batch."""
        varying = None if batch.varying is None else kept(batch.varying)
        context = self.owner.create_context()
        batch = batch._replace(features=kept(batch.features), varying=varying)
        self._ids.append((iteration, context, self.module.post(context, batch)))

    def look_up(self) -> None:
        """Moves the oldest batch on."""
        iteration, *batch = self._ids.popleft()
        self._embeddings.append((iteration, batch))

    def take(self, iteration: object) -> LazyAwaitable[Any] | None:
        """See ModuleStages."""
        batch: Any = super().take(iteration)
        if batch is None:
            return None
        embeddings: LazyAwaitable[Any] = self.owner.compute_and_output_dist(*batch)
        return embeddings

    def end(self, iteration: object) -> None:
        """Drops an iteration's batch if nobody has asked for it."""
        super().take(iteration)

    def finish_all(self) -> None:
        """Drops all batches."""
        self.forget()


class BoundedLagForward(BaseForward[TrainPipelineContext]):  # type: ignore[misc]
    """Replaces the forward of a sharded module in a model whose batches are pipelined."""

    stages: ModuleStages

    def input_of(self, batch: Any) -> Any:
        """Returns the argument with which the model would call the module for `batch`."""
        args, kwargs = self._module.preprocess_input(*self._args.build_args_kwargs(batch))
        return [*args, *kwargs.values()][0]

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Returns the embeddings of the batch that the pipeline calls the model with.

        Raises:
            ValueError: somebody else calls the model.
        """
        call = self.stages.call
        if call.thread != get_ident():
            under_way = self.stages.under_way
            what = f"which has {under_way} batches under way: drain() and " if under_way else ""
            raise ValueError(
                f"'{self._name}' belongs to a BoundedLagPipeline, {what or 'so '}detach() it "
                "before you call the model yourself"
            )
        embeddings = self.stages.take(call.iteration)
        if embeddings is None:
            raise RuntimeError(
                f"the model calls '{self._name}' more than once in a forward, but the pipeline "
                "prepares its embeddings once"
            )
        return embeddings


class RewrittenModel:
    """A model whose embedding modules return what their stages have prepared.

    Args:
        model: model that the pipeline calls with a batch.
        stages: stages of its embedding modules, by name.
        batch: any batch, for TorchRec's tracing; None, since tracing mostly needs none.

    Raises:
        ValueError: an embedding module cannot be pipelined; the text names it. The model stays as
            it was.
    """

    def __init__(self, model: nn.Module, stages: Mapping[str, ModuleStages], batch: Any) -> None:
        by_owner: dict[Any, ModuleStages] = {each.owner: each for each in stages.values()}
        originals = {owner: owner.forward for owner in by_owner}
        # TorchRec's tracing finds how the input of each sharded module comes from the batch.
        found, *_, left_out = _rewrite_model(
            model, TrainPipelineContext(), None, batch, pipelined_forward=BoundedLagForward
        )
        self._originals: list[tuple[Any, Callable[..., Any]]] = [
            (module, originals[module]) for module in found
        ]
        forwards: list[BoundedLagForward] = [module.forward for module in found]
        for module, forward in zip(found, forwards, strict=True):
            forward.stages = by_owner[module]
        names = [forward.name for forward in forwards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if left_out or repeated:
            self.restore()
        if left_out:
            raise ValueError(
                f"the input of {left_out} is not an attribute of the batch: the model changes it "
                "before the embedding module. Do that when loading the batch"
            )
        if repeated:
            raise ValueError(
                f"the model calls {repeated} more than once in a forward, but the pipeline "
                "prepares one call. Put the ids of all calls into one KeyedJaggedTensor"
            )
        self._forwards = {id(forward.stages): forward for forward in forwards}

    def check(self, stages: ModuleStages, batch: Any) -> CheckedBatch:
        """Returns the input of a module for `batch`; a batch without samples if the model skips it.

        Raises:
            Exception: the batch does not fit.
        """
        forward = self._forwards.get(id(stages))
        if forward is None:
            return stages.module.nothing()
        return stages.module.check_input(forward.input_of(batch))

    def restore(self) -> None:
        """Restores the modules' own forwards."""
        for module, forward in self._originals:
            module.forward = forward
            module.is_pipelined = False  # of a row-wise FeatureProcessedEmbeddingBagCollection
