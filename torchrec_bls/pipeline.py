"""Inference on ranks that may be up to `bound` iterations apart."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.fx.proxy import TraceError
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ShardedModule

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.inputs.refused_batches import RefusedBatchError, RefusedEmbeddings
from torchrec_bls.distributed.module_owner import owner_of
from torchrec_bls.errors import (
    BadBatchError,
    BLSError,
    PipelineError,
    RankFailedError,
    RendezvousError,
    named,
)
from torchrec_bls.pipeline_claim import ModelClaim, refuse_claimed
from torchrec_bls.pipeline_stages import ModelCall, ModuleStages, ReadStages, RewrittenModel

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class _Iteration(Generic[In]):
    """One step of this rank that is under way.

    Attributes:
        number: number of the batch, among the batches that this rank took.
        batch: batch; None where the rank takes part without one.
        error: error to raise in place of the output; None if there is none.
        answered: whether `progress` returns or raises for it.
        versions: versions of the model's weights when its embeddings were looked up.
    """

    number: int
    batch: In | None
    error: BadBatchError | None = None
    answered: bool = True
    versions: int = 0


class BoundedLagPipeline(TrainPipeline[In, Out]):  # type: ignore[misc]
    """Runs a sharded model so that ranks may be up to `bound` iterations apart.

    At step t a rank posts the ids of batch t. It waits for the ids of batch t - bound, looks them
    up and posts their embeddings. Then it waits for the embeddings of batch t - 2 bound and runs
    the rest of the model on it. So both exchanges of a batch have `bound` iterations of slack. A
    result comes 2 bound steps after its batch went in. (Section IV and Listing 2 of the bounded-lag
    paper have only the second exchange.) Results are those of the model called batch by batch.

    Ranks may have different numbers of batches. A rank that has no more takes part without samples
    until all ranks are at their end. The pipeline runs under torch.no_grad().

    If all embedding modules read tables directly (BLSConfig(lookup="direct")), the pipeline waits
    for no other rank: `progress` calls the model with the next batch, and its result has no lag.

    Args:
        model: a DistributedModelParallel whose embedding modules were sharded by bounded-lag
            sharders of one bound. It is called with a batch, as TorchRec's pipelines do, and
            must get each embedding module's input from the batch by attribute access alone.
        bound: iterations that ranks may be apart, at most the sharders' bound; that is the default.

    Raises:
        ValueError: there is no bounded-lag module, their bounds differ or are below `bound`, or the
            model calls one of them twice, or with something else than an attribute of the batch.
    """

    def __init__(self, model: nn.Module, bound: int | None = None) -> None:
        super().__init__()
        self._model = model
        self._call = ModelCall()
        self._stages = {
            name: ModuleStages(module, owner_of(module, model), self._call)
            for name, module in _modules_in_a_pipeline(model).items()
        }
        self._has_agreed_on_lookups = False
        bounds = {stages.module.bound for stages in self._stages.values()}
        if len(bounds) > 1:
            raise ValueError(f"the model's embedding modules have different bounds: {bounds}")
        self._channels_bound = bounds.pop()
        self._bound = self._channels_bound if bound is None else bound
        if not 0 <= self._bound <= self._channels_bound:
            raise ValueError(
                f"bound is {bound}, but the sharders' config allows from 0 to "
                f"{self._channels_bound}"
            )
        refuse_claimed(self._stages.values())
        with suppress(TraceError):
            # Tracing needs the batch if its class has a `to_proxy`. So it waits for the first
            # batch.
            RewrittenModel(model, self._stages, None).restore()
        self._claim: ModelClaim | None = None
        self._weights = [each for each in model.parameters() if not each.is_inference()]
        self._versions = 0
        self._running = Lock()
        self._has_failed = False
        self._updating_thread: int | None = None
        self._with_ids: deque[_Iteration[In]] = deque()
        self._looked_up: deque[_Iteration[In]] = deque()
        self._answers: deque[Out | PipelineError | None] = deque()
        self._batches = 0
        # Number of steps of all ranks since all were last at their end.
        self._posted = 0
        self._completed = 0
        self._ended = False
        self._last_step: int | None = None
        self._updates: deque[Callable[[], object]] = deque()
        self._updates_offered = 0
        self._updates_done = 0

    def progress(self, dataloader_iter: Iterator[In | None]) -> Out | None:
        """Returns the model's output for the next batch, in the order of the batches.

        It takes batches from the iterator as far ahead as the bound allows. Once the iterator is
        exhausted, each call finishes one of the batches under way. The last call returns when all
        ranks are at their end. After that the pipeline may get another iterator.

        If the iterator yields None, this rank has nothing to do at the moment. It takes part
        without samples, so that the others need not wait, and the output is None.

        Raises:
            StopIteration: all batches of all ranks are finished.
            BadBatchError: a batch does not fit the model, so that it has no output; it is a
                ValueError, and `iteration` says which batch. Other ranks and the next batch are not
                affected.
            PipelineError: the rest of the model raised for a batch, which is reported in the same
                way; or the iterator raised.
            BLSError: another rank failed, or this one during an exchange. All ranks raise, and the
                pipeline ends.
            ValueError: another thread is in a call of this pipeline, or somebody else is calling
                the model. Nothing is posted.
        """
        self._begin_call()
        try:
            with torch.no_grad():
                self._agree_on_lookups()
                if not self._stages:
                    return self._answer_at_once(dataloader_iter)
                self._claim_model()
                return self._next_answer(dataloader_iter)
        finally:
            self._running.release()

    def _next_answer(self, batches: Iterator[In | None]) -> Out | None:
        self._versions = self._count_versions()
        while True:
            if not self._is_last_posted():
                self._post_next(batches)
            draining = self._is_last_posted()
            if len(self._with_ids) > self._bound or (draining and self._with_ids):
                self._look_up()
            if len(self._looked_up) > self._bound or (draining and self._looked_up):
                self._finish()
            if self._answers:
                return self._answer()
            if draining and not self._with_ids and not self._looked_up:
                self._posted = self._completed = 0
                self._ended, self._last_step = False, None
                raise StopIteration

    def drain(self) -> list[Out | PipelineError | None]:
        """Finishes the batches under way on all ranks, which all have to call this or be at the end
        of their data.

        Returns:
            The outputs, in the order of the batches. In the place of one that `progress` would have
            raised for stands the error.
        """
        answers: list[Out | PipelineError | None] = []
        while True:
            try:
                answers.append(self.progress(iter(())))
            except StopIteration:
                return answers
            except PipelineError as error:
                answers.append(error)

    def update(self, function: Callable[[], object]) -> None:
        """Has `function` called between the same two batches on all ranks, to change weights.

        Requests may go on meanwhile. The call happens in a later `progress`, once all ranks have
        asked for as many updates: batches before it see none of it, in the embeddings of any rank
        and in the rest of the model, and batches after it see all of it. Where all modules read
        tables directly, it happens before the next batch of this rank, whatever the others do.

        Args:
            function: changes this rank's part of the model, e.g. by `load_state_dict`. What it
                raises fails all ranks, since their weights would be of two versions.
        """
        self._updates.append(function)
        self._updates_offered += 1

    def prepare(self, sample_batch: In, largest_batch: int | None = None) -> None:
        """Makes all channels before traffic, collectively, by sending `sample_batch`'s embeddings.

        Args:
            sample_batch: a usual batch of this rank. Its output is dropped.
            largest_batch: samples that a batch of a rank will ever have: messages in the slots get
                room for it. None: the sharders' expected_batch.

        Raises:
            ValueError: batches have gone through already.
            BLSError: the sample does not fit the model on one rank, which all raise for.
        """
        if self._posted:
            raise ValueError("prepare comes before the first batch, whose size made the channels")
        with torch.no_grad():
            self._agree_on_lookups()
        if not self._stages:
            return  # what is read is shared by now, whatever the size of a batch
        self._begin_call()
        try:
            with torch.no_grad():
                self._make_channels(self._claim_model(), sample_batch, largest_batch)
        finally:
            self._running.release()

    def _make_channels(self, claim: ModelClaim, batch: In, largest_batch: int | None) -> None:
        with self._all_or_none("preparing"):
            model = self._rewrite(claim, batch)
            iteration = object()
            for stages in self._stages.values():
                if largest_batch is not None:
                    stages.module.expect_batch(largest_batch)
                stages.post_ids(iteration, model.check(stages, batch), IdsNote())
            for stages in self._stages.values():
                stages.look_up()
            for stages in self._stages.values():
                stages.end(iteration)

    def detach(self) -> nn.Module:
        """Gives the model its own forwards back and returns it.

        After a BLSError the batches under way are dropped. The model's exchanges have failed, so
        that its calls raise such errors, but it may be sharded anew.

        Raises:
            ValueError: batches are under way.
        """
        self._begin_call()
        try:
            if self._is_under_way and not self._has_failed:
                raise ValueError(
                    "batches are under way: call progress until it raises StopIteration"
                )
            self._with_ids.clear()
            self._looked_up.clear()
            if self._claim is not None:
                self._claim.release()
                self._claim = None
        finally:
            self._running.release()
        return self._model

    @property
    def _is_under_way(self) -> bool:
        return bool(self._with_ids or self._looked_up)

    def _begin_call(self) -> None:
        """Refuses calls by other threads, and calls inside of a call."""
        if not self._running.acquire(blocking=False):
            raise ValueError(
                "the pipeline is in a call already, in another thread or further up in this one: "
                "one call at a time gets the next batch"
            )

    def _claim_model(self) -> ModelClaim:
        if self._claim is None:
            self._claim = ModelClaim(self, self._model, self._stages, self._refuse_loading)
        return self._claim

    def _refuse_loading(self) -> None:
        """Raises ValueError if weights may not be loaded now."""
        if self._is_under_way and not self._has_failed and self._updating_thread != get_ident():
            raise ValueError(
                "the model's BoundedLagPipeline has batches under way, which would get old rows "
                "and new weights: load by its update(), or call drain() first"
            )

    def _agree_on_lookups(self) -> None:
        """Drops the stages if no module exchanges, since nobody has to be waited for."""
        if not self._has_agreed_on_lookups:
            stages = {
                name: ReadStages(each.module, each.owner, self._call)
                if each.module.choose_lookup().is_direct
                else each
                for name, each in self._stages.items()
            }
            exchanges = not all(each.module.reads_directly for each in stages.values())
            self._stages = stages if exchanges else {}
            self._has_agreed_on_lookups = True

    def _answer_at_once(self, batches: Iterator[In | None]) -> Out | None:
        """Returns the output of the next batch, with nobody to wait for."""
        while self._updates:
            self._updates.popleft()()
        number = self._batches
        try:
            batch = next(batches)
        except StopIteration:
            raise
        except Exception as error:
            raise _failed("loading", number, error) from error
        self._batches += 1
        if batch is None:
            return None
        try:
            answer: Out = self._model(batch)
            if isinstance(answer, RefusedEmbeddings):
                answer.wait()
            return answer
        except RefusedBatchError as error:
            raise BadBatchError(f"iteration {number}: {error}", number) from error
        except BLSError:
            raise
        except Exception as error:
            raise _failed("model", number, error) from error

    def _is_last_posted(self) -> bool:
        return self._last_step is not None and self._posted > self._last_step

    def _post_next(self, batches: Iterator[In | None]) -> None:
        iteration = _Iteration[In](self._batches, None)
        if not self._ended:
            try:
                iteration.batch = next(batches)
                self._batches += 1
            except StopIteration:
                self._ended = True
            except Exception as error:
                raise _failed("loading", self._batches, error) from error
        iteration.answered = not self._ended
        checked = {name: stages.module.nothing() for name, stages in self._stages.items()}
        if iteration.batch is not None:
            model = self._rewrite(self._claim_model(), iteration.batch)
            try:
                checked = {
                    name: model.check(stages, iteration.batch)
                    for name, stages in self._stages.items()
                }
            except Exception as error:
                iteration.error = BadBatchError(
                    f"iteration {iteration.number}: {error}", iteration.number
                )
                iteration.error.__cause__ = error
        note = IdsNote(ended=self._ended, updates=self._updates_offered)
        with self._all_or_none(f"input dist of iteration {iteration.number}"):
            for name, stages in self._stages.items():
                stages.post_ids(iteration, checked[name], note)
            self._with_ids.append(iteration)
            self._posted += 1

    def _look_up(self) -> None:
        iteration = self._with_ids[0]
        with self._all_or_none(f"lookup of iteration {iteration.number}"):
            # Modules and sharding types all tell the same.
            layouts = [stages.look_up() for stages in self._stages.values()]
            iteration.versions = self._versions
            self._looked_up.append(self._with_ids.popleft())
            self._learn(next(filter(None, layouts), None))

    def _learn(self, told: IdsLayout | None) -> None:
        """Takes over what the ranks told along with the ids of the batch just looked up, in each
        module the same; None where no module has anything to exchange."""
        all_ended = self._ended if told is None else told.all_ended
        updates = self._updates_offered if told is None else told.updates
        if all_ended and self._last_step is None:
            # No rank is further ahead than that, whatever the bound of its pipeline.
            self._last_step = self._completed + self._channels_bound
        self._completed += 1
        while self._updates_done < updates:
            self._update()

    def _update(self) -> None:
        # Whose embeddings are of these weights gets the rest of the model of these weights.
        while self._looked_up:
            self._finish()
        function = self._updates.popleft()
        self._updating_thread = get_ident()
        try:
            function()
        finally:
            self._updating_thread = None
        self._versions = self._count_versions()
        self._updates_done += 1

    def _count_versions(self) -> int:
        """Returns a number that changes whenever weights are written to in place."""
        # At bound 0 a batch is finished in the step that looks it up.
        return sum([each._version for each in self._weights]) if self._bound else 0

    def _finish(self) -> None:
        iteration = self._looked_up.popleft()
        answer: Out | PipelineError | None = iteration.error
        with self._all_or_none(f"model of iteration {iteration.number}"):
            if iteration.batch is not None and iteration.error is None:
                try:
                    self._check_versions(iteration)
                    self._call.thread, self._call.iteration = get_ident(), iteration
                    answer = self._model(iteration.batch)
                except BLSError:
                    raise
                except Exception as error:
                    answer = _failed("model", iteration.number, error)
                finally:
                    self._call.thread = self._call.iteration = None
            for stages in self._stages.values():
                stages.end(iteration)
        if iteration.answered:
            self._answers.append(answer)

    def _check_versions(self, iteration: _Iteration[In]) -> None:
        if iteration.versions != self._versions:
            raise ValueError(
                "weights were written to after its embeddings were looked up, so that its output "
                "would be of two versions: write by the pipeline's update(), or call drain() first"
            )

    def _answer(self) -> Out | None:
        answer = self._answers.popleft()
        if isinstance(answer, PipelineError):
            raise answer
        return answer

    def _rewrite(self, claim: ModelClaim, batch: In) -> RewrittenModel:
        if claim.rewritten is None:
            claim.rewritten = RewrittenModel(self._model, self._stages, batch)
        return claim.rewritten

    @contextmanager
    def _all_or_none(self, what: str) -> Iterator[None]:
        """Fails all ranks for whatever ends this rank's part between the messages of a step."""
        try:
            yield
        except RendezvousError:
            self._has_failed = True
            raise  # the other ranks were in it, too
        except BaseException as error:
            self._has_failed = True
            message = f"{what} failed: {named(error)}"
            self._fail(message)
            if isinstance(error, BLSError) or not isinstance(error, Exception):
                raise
            raise RankFailedError(message) from error

    def _fail(self, reason: str) -> None:
        # Other ranks may wait for this one in another channel than the one that failed.
        for stages in self._stages.values():
            if not stages.module.reads_directly:
                stages.module.fail(reason)


def _failed(stage: str, iteration: int, error: Exception) -> PipelineError:
    failed = PipelineError(f"{stage} of iteration {iteration} failed: {named(error)}", iteration)
    failed.__cause__ = error
    return failed


def bounded_lag_modules(model: nn.Module) -> dict[str, BoundedLagModule]:
    """Returns the bounded-lag modules of a sharded model by their names in it.

    Raises:
        ValueError: there is none, or an embedding module was sharded by another sharder.
    """
    if isinstance(model, DistributedModelParallel):
        model = model.module
    sharded = {n: m for n, m in model.named_modules() if isinstance(m, ShardedModule)}
    ours = {n: m for n, m in sharded.items() if isinstance(m, BoundedLagModule)}
    others = [
        name
        for name, m in sharded.items()
        if not any(isinstance(part, BoundedLagModule) for part in m.modules())
    ]
    if others or not sharded:
        found = f"{others} were sharded by others" if others else "the model has no sharded module"
        raise ValueError(
            f"{found}: give BLSEmbeddingCollectionSharder and BLSEmbeddingBagCollectionSharder to "
            "DistributedModelParallel"
        )
    return ours


def _modules_in_a_pipeline(model: nn.Module) -> dict[str, BoundedLagModule]:
    """Returns the bounded-lag modules of a sharded model by their names in it.

    Raises:
        ValueError: for the reasons of `bounded_lag_modules`, or one is quantized and reads its
            tables directly.
    """
    modules = bounded_lag_modules(model)
    quantized = [name for name, m in modules.items() if m.is_quantized and m.reads_directly]
    if quantized:
        raise ValueError(
            f"{quantized} read quantized tables directly and exchange nothing: call the model "
            'itself, or shard with BLSConfig(lookup="exchange")'
        )
    return modules


def bounded_lag_channels(model: nn.Module) -> list[BoundedLagChannel]:
    """Returns the channels that the bounded-lag modules of a sharded model made so far.

    Raises:
        ValueError: for the reasons of `bounded_lag_modules`.
    """
    return [
        channel
        for module in bounded_lag_modules(model).values()
        for channel in module.channels().values()
    ]
