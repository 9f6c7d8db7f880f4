"""Requests that wait for their batch, by their deadlines."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_bls.serve.inputs import Features
from torchrec_bls.serve.predictor import Costs, Predictor

#: Seconds that the model may take for a batch by prediction: the longer, the more requests are
#: answered. Meanwhile nobody is refused.
LONGEST_BATCH = 0.004
#: Seconds from one batch to the next in overload, when there are many to refuse.
LONGEST_TURN = 0.003
# Seconds from a reply to its last byte at the caller, of which this process sees nothing.
_MARGIN = 0.0005


def longest_batch(fixed: float, stretch: float, is_overloaded: bool) -> float:
    """Returns the seconds that a batch may take by prediction: LONGEST_BATCH, in overload fewer, so
    that refusals are prompt; or more where more than half of that would be costs that each batch
    has. Small batches would cost more than they spare then.

    Args:
        fixed: seconds that a batch of any size takes.
        stretch: factor of the time from one batch to the next over that of a batch.
        is_overloaded: whether many requests are refused.
    """
    longest = min(LONGEST_BATCH, LONGEST_TURN / stretch) if is_overloaded else LONGEST_BATCH
    return max(longest, 2 * fixed)


class Answer(NamedTuple):
    """What the model says of a request.

    Attributes:
        outputs: each output by name, float32 [samples, ...].
        version: version of the weights.
        batch: samples of its batch, or of its last one.
        queue_s: seconds that it waited for its first batch.
        behind_s: seconds that those behind it in its last batch were to take.
    """

    outputs: dict[str, NDArray[np.float32]]
    version: str
    batch: int
    queue_s: float
    behind_s: float = 0.0


class Forecast(NamedTuple):
    """What would become of a request.

    Attributes:
        end: predicted moment of its answer.
        slack_s: seconds from the predicted end to the deadline, of the one of it and those that it
            delays that has fewest; of them up to the first that would be too late.
        late_s: seconds by which it, or the first one that it delays too much, would be too late; 0
            if none would be.
    """

    end: float
    slack_s: float
    late_s: float


class Request:
    """A request that waits.

    Args:
        features: what the model is asked.
        deadline: moment of its last byte, in seconds of `time.monotonic()`.
        arrived: moment of its arrival.
        answer: what its caller waits for.

    Attributes:
        features: see above.
        deadline: see above.
        arrived: see above.
        answer: see above.
        answered: answers of its first samples, if it takes longer than a batch may.
        done: number of these samples.
    """

    __slots__ = ("answer", "answered", "arrived", "deadline", "done", "features")

    def __init__(
        self,
        features: Features,
        deadline: float,
        arrived: float,
        answer: "asyncio.Future[Answer]",
    ) -> None:
        self.features = features
        self.deadline = deadline
        self.arrived = arrived
        self.answer = answer
        self.answered: list[Answer] = []
        self.done = 0

    @property
    def samples(self) -> int:
        """Returns the number of samples that are not answered yet."""
        return self.features.samples - self.done

    @property
    def ids(self) -> float:
        """Returns the number of ids that were not looked up yet, if each sample has as many."""
        whole = self.features
        return whole.ids * self.samples / whole.samples


class Part(NamedTuple):
    """Samples of a request in a batch.

    Attributes:
        request: the request.
        first: number of its first sample.
        end: number after the last one.
    """

    request: Request
    first: int
    end: int


class _Terms(NamedTuple):
    """What decides which requests a batch takes, and how long.

    Attributes:
        fixed: seconds of a batch of any size.
        of_sample: of each sample.
        of_id: of each id.
        stretch: factor of the time from one batch to the next over that.
        longest: seconds that a batch may take without the factor.
        max_samples: samples that it may have.
    """

    fixed: float
    of_sample: float
    of_id: float
    stretch: float
    longest: float
    max_samples: int


class _Batch(NamedTuple):
    """A batch to come, with the requests that it has so far.

    Attributes:
        begin: when it begins.
        first_deadline: deadline of its first request.
        cost: seconds of the model for its requests, besides those of any batch.
        samples: its samples.
    """

    begin: float
    first_deadline: float = 0.0
    cost: float = 0.0
    samples: int = 0

    def end(self, terms: _Terms) -> float:
        """Returns when the next one can begin."""
        return self.begin + terms.stretch * (terms.fixed + self.cost)

    def with_next(self, terms: _Terms, samples: int, ids: float, deadline: float) -> "_Batch":
        """Returns the batch that answers one request more: this one, or the next one."""
        fixed, of_sample, of_id, stretch, longest, max_samples = terms
        begin, first_deadline, cost, count = self
        own = of_sample * samples + of_id * ids
        if count:
            total = fixed + cost + own
            if (
                total <= longest
                and count + samples <= max_samples
                and begin + stretch * total <= first_deadline - _MARGIN
            ):
                return _Batch(begin, first_deadline, cost + own, count + samples)
            begin += stretch * (fixed + cost)
        if fixed + own > longest and samples > 1:
            # All its parts but the last one are batches of their own.
            of_part = _part(samples, own, longest - fixed)
            of_one = own / samples
            parts = math.ceil((own - (longest - fixed)) / (of_one * of_part))
            parts = min(parts, (samples - 1) // of_part)
            begin += stretch * parts * (fixed + of_one * of_part)
            samples -= parts * of_part
            own = of_one * samples
        return _Batch(begin, deadline, own, samples)


class Waiting:
    """The requests that wait, the earliest deadline first.

    A batch takes what fits the longest time of a batch and the deadline of its first request.

    Args:
        predictor: predictor of batches.
        max_samples: samples that a batch may have.

    Attributes:
        is_overloaded: whether many requests are refused, so that batches are short.
    """

    def __init__(self, predictor: Predictor, max_samples: int) -> None:
        self._predictor = predictor
        self._max_samples = max_samples
        self.is_overloaded = False
        self._requests: list[Request] = []
        # The last batch of the first requests, of none, one and so on: each that comes is placed
        # behind those that wait, and most of them wait still when the next one comes.
        self._batches: list[_Batch] = []
        # By which these were made, and of which that follows.
        self._terms = _Terms(0.0, 0.0, 0.0, 0.0, 0.0, max_samples)
        self._told: tuple[Costs, float, bool] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Adds a request."""
        place = self._place(request.deadline)
        del self._batches[place + 1 :]
        self._requests.insert(place, request)

    def take_all(self) -> list[Request]:
        """Removes all requests, and returns them."""
        self._batches.clear()
        taken, self._requests = self._requests, []
        return taken

    def forget_answered(self) -> None:
        """Removes requests that have their answer already, or whose callers have left."""
        self._batches.clear()
        self._requests = [each for each in self._requests if not each.answer.done()]

    def discard(self, request: Request) -> None:
        """Removes a request, if it is there."""
        if request in self._requests:
            self._batches.clear()
            self._requests.remove(request)

    def forecast(self, samples: int, ids: int, deadline: float, now: float) -> Forecast:
        """Returns what would become of a new request, and of those that it would delay.

        Args:
            samples: samples of the new one.
            ids: its ids.
            deadline: its deadline.
            now: this moment.
        """
        terms = self._upheld(now)
        place = self._place(deadline)
        # Batches begin later than those that were made some moments ago.
        later = now - self._batches[0].begin
        margin = self._predictor.safe_margin_s if self.is_overloaded else self._predictor.margin_s
        own = batch = self._batch_of_first(place, terms).with_next(
            terms, max(1, samples), ids, deadline
        )
        slack = math.inf
        late = 0.0
        others = iter(self._requests[place:])
        while True:
            own_slack = deadline - _MARGIN - batch.end(terms) - later
            # A margin of more than half of its time would refuse it where nobody waits, and no end
            # would ever show that less is enough.
            own_margin = min(margin, max(0.0, (deadline - now) / 2))
            slack, late = min(slack, own_slack), max(late, own_margin - own_slack)
            other = next(others, None)
            if other is None or late > 0:  # one is enough to refuse it
                return Forecast(own.end(terms) + later, slack, late)
            deadline = other.deadline
            last, batch = batch, batch.with_next(terms, other.samples, other.ids, deadline)
            if own is last and batch.samples > other.samples:  # it joins that one
                own = batch

    def rest_s(self, now: float) -> float:
        """Returns the seconds until all that wait would be answered.

        Args:
            now: this moment.
        """
        if not self._requests:
            return 0.0
        terms = self._upheld(now)
        return self._batch_of_first(len(self._requests), terms).end(terms) - self._batches[0].begin

    def hopeless(self, now: float) -> list[Request]:
        """Removes the first requests that can't be in time any more, and returns them."""
        costs = self._predictor.costs
        gone = list(
            takewhile(
                lambda each: (
                    not each.answered
                    and now + costs.batch + costs.sample * each.samples + costs.id * each.ids
                    > each.deadline
                ),
                self._requests,
            )
        )
        if gone:
            self._batches.clear()
            del self._requests[: len(gone)]
        return gone

    def next_batch(self, now: float) -> list[Part]:
        """Removes the requests of the next batch, and returns them. Of one that takes longer than a
        batch may, it returns a part; the rest goes on waiting."""
        fixed, of_sample, of_id = self._predictor.costs
        stretch = self._predictor.stretch
        longest = longest_batch(fixed, stretch, self.is_overloaded)
        self._batches.clear()
        taken: list[Part] = []
        cost, count = fixed, 0
        for each in self._requests:
            own = of_sample * each.samples + of_id * each.ids
            if not taken and fixed + own > longest and each.samples > 1:
                end = each.done + _part(each.samples, own, longest - fixed)
                return [Part(each, each.done, end)]
            if taken and (
                cost + own > longest
                or count + each.samples > self._max_samples
                or now + stretch * (cost + own) > taken[0].request.deadline - _MARGIN
            ):
                break
            taken.append(Part(each, each.done, each.features.samples))
            cost += own
            count += each.samples
        del self._requests[: len(taken)]
        return taken

    def _place(self, deadline: float) -> int:
        return bisect_right(self._requests, deadline, key=lambda each: each.deadline)

    def _upheld(self, now: float) -> _Terms:
        """Returns the terms of now. Batches that others had made are forgotten."""
        told = self._predictor.costs, self._predictor.stretch, self.is_overloaded
        if told != self._told or not self._batches or not self._requests:
            costs, stretch, is_overloaded = self._told = told
            longest = longest_batch(costs.batch, stretch, is_overloaded)
            self._terms = _Terms(*costs, stretch, longest, self._max_samples)
            self._batches = [_Batch(now)]
        return self._terms

    def _batch_of_first(self, count: int, terms: _Terms) -> _Batch:
        """Returns the last batch of as many requests as are given, which are the first ones."""
        batches = self._batches
        while len(batches) <= count:
            each = self._requests[len(batches) - 1]
            batches.append(batches[-1].with_next(terms, each.samples, each.ids, each.deadline))
        return batches[count]


def _part(samples: int, seconds: float, room: float) -> int:
    """Returns how many samples of a request are a batch of their own.

    Args:
        samples: its samples.
        seconds: what they take.
        room: what a batch has room for, which is less.
    """
    return max(1, int(samples * (room / seconds)))


def joined(answers: Sequence[Answer]) -> Answer:
    """Returns the answer of a request from those of its parts, which are of one version."""
    last = answers[-1]
    if len(answers) == 1:
        return last
    outputs = {
        name: np.concatenate([each.outputs[name] for each in answers]) for name in last.outputs
    }
    return last._replace(outputs=outputs, queue_s=answers[0].queue_s)
