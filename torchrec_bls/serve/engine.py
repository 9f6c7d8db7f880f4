"""Runs the model for the requests that wait, in the thread of the event loop."""

import asyncio
import math
import time
from collections.abc import Sequence

import numpy as np

from torchrec_bls.direct.serving.reading_modules import reading_modules
from torchrec_bls.errors import DrainedError, named
from torchrec_bls.serve.arrivals import Arrivals
from torchrec_bls.serve.batches import features_of
from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.inputs import Features, ModelInputs
from torchrec_bls.serve.model_calls import ModelCalls
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.predictor import Predictor
from torchrec_bls.serve.refusals import Refusals
from torchrec_bls.serve.waiting import Answer, Part, Request, Waiting, joined

# Turns of the event loop between two batches: answers are written and heads are read in the first,
# and those heads are admitted or refused in the second.
_TURNS = 2
# Requests that may wait at most: each that comes is compared with all of them.
_MOST_WAITING = 1024
# Share of requests that are refused in overload.
_OVERLOAD = 0.05
# Seconds without a batch after which a correction of predictions may be out of date.
_OUT_OF_DATE = 1.0


class Engine:
    """Answers requests: decides at their arrival, batches them, and calls the model.

    Args:
        calls: calls of the model, which has attached to its tables.
        inputs: what it takes.
        predictor: predictor of its batches.
        contract: what is promised.
        observer: who is told of batches.

    Attributes:
        inputs: see above.
        contract: see above.
        arrivals: when requests arrived.
        drained_for: version that is being made while none serves, or empty. Requests are refused
            then.
    """

    def __init__(
        self,
        calls: ModelCalls,
        inputs: ModelInputs,
        predictor: Predictor,
        contract: Contract,
        observer: Observer,
    ) -> None:
        self.inputs = inputs
        self.contract = contract
        self.arrivals = Arrivals()
        self.drained_for = ""
        self._reader = next(iter(reading_modules(calls.model).values()))
        self._calls = calls
        self._predictor = predictor
        self._observer = observer
        self._waiting = Waiting(predictor, contract.max_samples)
        self._refusals = Refusals()
        self._wake = asyncio.Event()
        self._has_ended = False
        self._last_batch = 0.0  # when it began
        self._noted = ""  # version that the observer knows of

    @property
    def version(self) -> str:
        """Returns the version of the last batch."""
        return self._reader.version

    @property
    def waiting(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting)

    def deadline(self, arrived: float, timeout_us: int | None) -> float:
        """Returns the deadline of a request.

        Args:
            arrived: moment of its arrival.
            timeout_us: microseconds that its caller gives it; None: the contract's.
        """
        if timeout_us is None:
            return arrived + self.contract.deadline_ms / 1e3
        return arrived + timeout_us / 1e6

    def check(self, samples: int, ids: int, deadline: float) -> float:
        """Returns the predicted end of a request.

        Args:
            samples: its samples.
            ids: its ids.
            deadline: its deadline.

        Raises:
            RequestError: it can't be answered in time, or delays one that was admitted; or no
                version serves.
        """
        if self.drained_for:
            raise _drained(self.drained_for)
        if self._has_ended:
            raise _ended()
        now = time.monotonic()
        if self.waiting >= _MOST_WAITING:
            text = f"{self.waiting} requests wait already"
            raise RequestError(Outcome.REFUSED, text, self._waiting.rest_s(now))
        end, slack, late = self._waiting.forecast(samples, ids, deadline, now)
        if late > 0 and now - self._last_batch > _OUT_OF_DATE and not self.waiting:
            # Were all refused by a correction, no batch would ever show that it holds no more.
            self._predictor.forget()
            end, slack, late = self._waiting.forecast(samples, ids, deadline, now)
        self._predictor.observe_slack(slack)
        if late > 0:
            raise RequestError(
                Outcome.REFUSED,
                f"it would be late by {late * 1e3:.1f} ms: {self.waiting} requests wait, and "
                f"it has {max(0.0, deadline - now) * 1e3:.1f} ms",
                # Alone it would be late again.
                max(late, self._waiting.rest_s(now)) if self.waiting else None,
            )
        return end

    def decided(self, *, is_refused: bool) -> None:
        """Takes into account that a request was refused at its arrival, or was not."""
        self._refusals.add(is_refused, time.monotonic())
        self._waiting.is_overloaded = self._refusals.share > _OVERLOAD

    def ended(self, predicted: float) -> None:
        """Takes into account that a request ends now.

        Args:
            predicted: predicted end of the request.
        """
        self._predictor.observe_end(time.monotonic() - predicted)

    def submit(self, features: Features, deadline: float, arrived: float) -> Request:
        """Has a request wait for its batch. Whoever cancels its answer takes it back.

        Args:
            features: what the model is asked; at least one sample.
            deadline: deadline of the request.
            arrived: moment of its arrival.
        """
        request = Request(features, deadline, arrived, asyncio.get_running_loop().create_future())
        self._waiting.add(request)
        self._wake.set()
        return request

    def ask_nothing(self, features: Features) -> None:
        """Runs a batch for nobody, whatever comes of it.

        Args:
            features: features of a request that is made up.
        """
        request = self.submit(features, math.inf, time.monotonic())
        request.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    async def run(self) -> None:
        """Runs batches until it is cancelled. If it ends by an error, nobody waits any more."""
        try:
            await self._run_batches()
        finally:
            self._has_ended = True
            for request in self._waiting.take_all():
                if not request.answer.done():
                    request.answer.set_exception(_ended())

    async def _run_batches(self) -> None:
        self._note_version()
        while True:
            if not self.waiting:
                self._wake.clear()
                self.arrivals.rest()
                await self._wake.wait()
                await self._look_at_sockets()
            self._waiting.forget_answered()
            self._end_hopeless()
            began = time.monotonic()
            parts = self._waiting.next_batch(began)
            if not parts:
                continue
            self._last_batch = began
            try:
                size = self._answer(parts, began)
            except BaseException:
                self._end(parts, _ended())
                raise
            ended = time.monotonic()
            await self._look_at_sockets()
            if size is not None:
                # Answers and refusals take until the next batch, which those that wait feel.
                turn = time.monotonic() if self.waiting else ended
                self._predictor.observe(*size, ended - began, turn - began)

    async def _look_at_sockets(self) -> None:
        for _ in range(_TURNS):
            self.arrivals.look()
            await asyncio.sleep(0)

    def _note_version(self) -> str:
        """Returns the version of the last batch, and tells the observer of another one than
        before."""
        version = self.version
        if version != self._noted:
            self._noted = version
            self._observer.changed_version()
        return version

    def _end_hopeless(self) -> None:
        for request in self._waiting.hopeless(time.monotonic()):
            if not request.answer.done():
                request.answer.set_exception(
                    RequestError(
                        Outcome.EXPIRED,
                        "it was admitted, but batches before it took longer than was predicted",
                        self._waiting.rest_s(time.monotonic()),
                    )
                )

    def _answer(self, parts: Sequence[Part], began: float) -> tuple[int, int] | None:
        """Runs a batch, and gives each request its answer. Returns its samples and ids, or None if
        it failed."""
        features = [features_of(part) for part in parts]
        samples, ids = sum(each.samples for each in features), sum(each.ids for each in features)
        try:
            outputs = self._calls.answered(features)
            version = self._note_version()
        except DrainedError as error:
            self._end(parts, _drained(str(error)))
            return None
        except Exception as error:
            if len(parts) > 1:
                # One of them may be the cause, and is found by halves.
                middle = len(parts) // 2
                self._answer(parts[:middle], began)
                self._answer(parts[middle:], began)
            else:
                self._end(parts, RequestError(Outcome.FAILED, f"the model failed: {named(error)}"))
            return None
        predicted = self._predictor.seconds(samples, ids)
        self._observer.batch(samples, time.monotonic() - began, predicted)
        at, ids_at = 0, 0
        for part, each in zip(parts, features, strict=True):
            own = {name: of_all[at : at + each.samples] for name, of_all in outputs.items()}
            at += each.samples
            ids_at += each.ids
            behind_s = self._predictor.more_s(samples - at, ids - ids_at)
            queue_s = began - part.request.arrived
            self._give(part, Answer(own, version, samples, queue_s, behind_s))
        return samples, ids

    def _give(self, part: Part, answer: Answer) -> None:
        request = part.request
        if request.answer.done():  # its caller left
            self._waiting.discard(request)
        elif not all(np.isfinite(each).all() for each in answer.outputs.values()):
            text = f"the model of version '{answer.version}' returned NaN or infinite numbers"
            self._end([part], RequestError(Outcome.FAILED, text))
        elif request.answered and request.answered[-1].version != answer.version:
            # An answer is of one version: all its samples are asked again.
            request.answered, request.done = [], 0
            self._waiting.discard(request)
            self._waiting.add(request)
        else:
            request.answered.append(answer)
            request.done = part.end
            if request.done == request.features.samples:
                request.answer.set_result(joined(request.answered))

    def _end(self, parts: Sequence[Part], error: RequestError) -> None:
        for part in parts:
            self._waiting.discard(part.request)
            if not part.request.answer.done():
                part.request.answer.set_exception(error)


def _ended() -> RequestError:
    return RequestError(Outcome.FAILED, "the service has ended: its log says why")


def _drained(text: str) -> RequestError:
    return RequestError(Outcome.DRAINED, text, 1.0)
