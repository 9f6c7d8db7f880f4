"""Inference with ranks up to `bound` iterations apart."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.train_pipeline.utils import _rewrite_model
from torchrec.distributed.types import LazyAwaitable, ShardedModule

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.distributed.module import BoundedLagModule
from torchrec_bls.errors import BLSError, PipelineError, RendezvousError

In = TypeVar("In")
Out = TypeVar("Out")


class BoundedLagForward(BaseForward[TrainPipelineContext]):  # type: ignore[misc]
    """Stands for the forward of a sharded module in a pipeline: the stages of one module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ids: deque[tuple[Any, Any]] = deque()
        self._embeddings: deque[LazyAwaitable[Any]] = deque()

    def start(self, batch: Any) -> None:
        """Posts the ids of `batch`."""
        args, kwargs = self._args.build_args_kwargs(batch)
        args, kwargs = self._module.preprocess_input(args, kwargs)
        context = self._module.create_context()
        self._ids.append((context, self._module.input_dist(context, *args, **kwargs)))

    def look_up(self) -> None:
        """Waits for the ids of the oldest batch, looks them up and posts the embeddings."""
        context, awaitable = self._ids.popleft()
        ids = awaitable.wait().wait()
        self._embeddings.append(self._module.compute_and_output_dist(context, ids))

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Returns the embeddings of the oldest batch that was looked up."""
        if not self._embeddings:
            raise RuntimeError(
                f"the model calls '{self._name}' more than once in a forward, but the pipeline "
                "prepares its embeddings once"
            )
        return self._embeddings.popleft()

    def skip(self) -> None:
        """Completes the exchange of a batch whose embeddings the model did not ask for."""
        self._embeddings.popleft().wait()

    @property
    def looked_up(self) -> int:
        """Batches looked up and not handed to the model yet."""
        return len(self._embeddings)


class BoundedLagPipeline(TrainPipeline[In, Out]):  # type: ignore[misc]
    """Runs a sharded model so that ranks may be up to `bound` iterations apart.

    At step t a rank posts the ids of batch t, waits for those of batch t - bound, looks them up and
    posts their embeddings, then waits for the embeddings of batch t - 2 bound and runs the rest of
    the model on it. Both exchanges of a batch thus have `bound` iterations of slack; a result comes
    2 bound steps after its batch went in (section IV and Listing 2 of the bounded-lag paper, which
    has the second exchange only). Results are those of the model called batch by batch.

    All ranks have to feed the same number of batches. The pipeline runs under torch.no_grad().

    Args:
        model: a DistributedModelParallel whose embedding modules were sharded by bounded-lag
            sharders of one bound. It is called with a batch, as TorchRec's pipelines do, and
            must get each embedding module's input from the batch by attribute access alone.
        bound: at most that of the sharders, which is the default.

    Raises:
        ValueError: no bounded-lag module is found, or one cannot be pipelined; it is named.
    """

    def __init__(self, model: nn.Module, bound: int | None = None) -> None:
        super().__init__()
        self._model = model
        self._modules = bounded_lag_modules(model)
        bounds = {module.bound for module in self._modules.values()}
        if len(bounds) > 1:
            raise ValueError(f"the model's embedding modules have different bounds: {bounds}")
        possible = bounds.pop()
        self._bound = possible if bound is None else bound
        if not 0 <= self._bound <= possible:
            raise ValueError(
                f"bound is {bound}, but the sharders' config allows from 0 to {possible}"
            )
        self._forwards: list[BoundedLagForward] | None = None
        self._originals: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._with_ids: deque[In] = deque()
        self._looked_up: deque[In] = deque()
        self._started = 0
        self._finished = 0

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Returns the model's output for the next batch, in the order of the batches.

        Takes batches from the iterator as far ahead as the bound allows. Once it is exhausted, the
        batches under way are finished, one per call.

        Raises:
            StopIteration: all batches are finished.
            PipelineError: the model, the iterator or the input raised; `iteration` says at which
                batch. The other ranks raise PoisonedError naming this one.
            BLSError: another rank failed.
        """
        with torch.no_grad():
            while True:
                with self._stage("loading", self._started):
                    batch = next(dataloader_iter, None)
                if batch is not None:
                    with self._stage("input dist", self._started):
                        self._start(batch)
                if not self._with_ids and not self._looked_up:
                    raise StopIteration
                draining = batch is None
                if len(self._with_ids) > self._bound or (draining and self._with_ids):
                    with self._stage("lookup", self._finished + len(self._looked_up)):
                        self._look_up()
                if len(self._looked_up) > self._bound or draining:
                    with self._stage("model", self._finished):
                        return self._finish()

    def detach(self) -> nn.Module:
        """Gives the model its own forwards back and returns it.

        Raises:
            ValueError: batches are under way.
        """
        if self._with_ids or self._looked_up:
            raise ValueError("batches are under way: call progress until it raises StopIteration")
        self._restore()
        return self._model

    def _restore(self) -> None:
        for module, forward in self._originals:
            module.forward = forward
        self._originals = []
        self._forwards = None

    def _start(self, batch: In) -> None:
        if self._forwards is None:
            self._forwards = self._rewrite(batch)
        for forward in self._forwards:
            forward.start(batch)
        self._with_ids.append(batch)
        self._started += 1

    def _look_up(self) -> None:
        for forward in self._forwards or []:
            forward.look_up()
        self._looked_up.append(self._with_ids.popleft())

    def _finish(self) -> Out:
        batch = self._looked_up.popleft()
        output: Out = self._model(batch)
        for forward in self._forwards or []:
            while forward.looked_up > len(self._looked_up):
                forward.skip()
        self._finished += 1
        return output

    @contextmanager
    def _stage(self, name: str, iteration: int) -> Iterator[None]:
        try:
            yield
        except RendezvousError:
            raise  # the other ranks were in it, too
        except Exception as error:
            message = f"{name} of iteration {iteration} failed: {type(error).__name__}: {error}"
            # Other ranks may wait for this one in another channel than the one that failed.
            for module in self._modules.values():
                module.fail(message)
            if isinstance(error, BLSError):
                raise
            raise PipelineError(message, iteration) from error

    def _rewrite(self, batch: In) -> list[BoundedLagForward]:
        # TorchRec's tracing finds how each sharded module's input comes from the batch.
        originals = {id(m): m.forward for m in self._modules.values()}
        rewritten, *_, left_out = _rewrite_model(
            self._model, TrainPipelineContext(), None, batch, pipelined_forward=BoundedLagForward
        )
        self._originals = [(module, originals[id(module)]) for module in rewritten]
        forwards: list[BoundedLagForward] = [module.forward for module in rewritten]
        names = [forward.name for forward in forwards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if left_out or repeated:
            self._restore()
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
        return forwards


def bounded_lag_modules(model: nn.Module) -> dict[str, BoundedLagModule]:
    """Returns the bounded-lag modules of a sharded model by their names in it.

    Raises:
        ValueError: there is none, or an embedding module was sharded by another sharder.
    """
    if isinstance(model, DistributedModelParallel):
        model = model.module
    sharded = {n: m for n, m in model.named_modules() if isinstance(m, ShardedModule)}
    others = [name for name, m in sharded.items() if not isinstance(m, BoundedLagModule)]
    if others or not sharded:
        found = f"{others} were sharded by others" if others else "the model has no sharded module"
        raise ValueError(
            f"{found}: give BLSEmbeddingCollectionSharder and BLSEmbeddingBagCollectionSharder to "
            "DistributedModelParallel"
        )
    return {n: m for n, m in sharded.items() if isinstance(m, BoundedLagModule)}


def bounded_lag_channels(model: nn.Module) -> list[BoundedLagChannel]:
    """Returns the channels that the bounded-lag modules of a sharded model made so far.

    Raises:
        ValueError: as of `bounded_lag_modules`.
    """
    return [
        channel
        for module in bounded_lag_modules(model).values()
        for channel in module.channels().values()
    ]
