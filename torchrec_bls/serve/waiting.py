"""Requests that wait for their batch, by their deadlines."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_bls.serve.inputs import Features
from torchrec_bls.serve.predictor import Predictor

#: Seconds that the model may take for a batch by prediction, see `longest_batch`: the longer, the
#: more requests are answered. Meanwhile nobody is refused, so that where many are it may take less.
LONGEST_BATCH, LONGEST_IN_OVERLOAD = 0.004, 0.0015
# Seconds from a reply to its last byte at the caller, of which this process sees nothing.
_MARGIN = 0.0005


def longest_batch(fixed: float, is_overloaded: bool) -> float:
    """Returns the seconds that a batch may take by prediction: LONGEST_BATCH, in overload
    LONGEST_IN_OVERLOAD, or more where more than half of that would be costs that each batch has.
    Small batches would cost more than they spare then.

    Args:
        fixed: seconds that a batch of any size takes.
        is_overloaded: whether many requests are refused.
    """
    return max(LONGEST_IN_OVERLOAD if is_overloaded else LONGEST_BATCH, 2 * fixed)


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
            delays that has fewest.
        late_s: seconds by which it, or one that it delays, would be too late; 0 if none would be.
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

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._requests.insert(self._place(request.deadline), request)

    def take_all(self) -> list[Request]:
        """Removes all requests, and returns them."""
        taken, self._requests = self._requests, []
        return taken

    def forget_answered(self) -> None:
        """Removes requests that have their answer already, or whose callers have left."""
        self._requests = [each for each in self._requests if not each.answer.done()]

    def discard(self, request: Request) -> None:
        """Removes a request, if it is there."""
        if request in self._requests:
            self._requests.remove(request)

    def forecast(self, samples: int, ids: int, deadline: float, now: float) -> Forecast:
        """Returns what would become of a new request, and of those that it would delay.

        Args:
            samples: samples of the new one.
            ids: its ids.
            deadline: its deadline.
            now: this moment.
        """
        place = self._place(deadline)
        fixed, of_sample, of_id = self._predictor.costs
        longest = longest_batch(fixed, self.is_overloaded)
        predictor = self._predictor
        stretch = predictor.stretch
        margin = predictor.safe_margin_s if self.is_overloaded else predictor.margin_s
        own_end = late = 0.0
        slack = math.inf
        is_own = False  # whether the batch has the new one
        # A batch of `count` samples begins at `begin`, and takes the model `fixed + cost`.
        begin, first_deadline, cost, count = now, 0.0, 0.0, 0
        for number, (each_samples, each_ids, each_deadline) in enumerate(
            self._with(place, max(1, samples), ids, deadline)
        ):
            own = of_sample * each_samples + of_id * each_ids
            total = fixed + cost + own
            if count and (
                total > longest
                or count + each_samples > self._max_samples
                or begin + stretch * total > first_deadline - _MARGIN
            ):
                begin += stretch * (fixed + cost)
                cost, count, total = 0.0, 0, fixed + own
                is_own = False
            is_own = is_own or number == place
            if not count:
                first_deadline = each_deadline
                if total > longest and each_samples > 1:
                    # All its parts but the last one are batches of their own.
                    of_part = _part(each_samples, own, longest - fixed)
                    of_one = own / each_samples
                    parts = math.ceil((own - (longest - fixed)) / (of_one * of_part))
                    parts = min(parts, (each_samples - 1) // of_part)
                    begin += stretch * parts * (fixed + of_one * of_part)
                    each_samples -= parts * of_part
                    own = of_one * each_samples
            cost += own
            count += each_samples
            if number >= place:
                end = begin + stretch * (fixed + cost)
                # A margin of more than half of its time would refuse it where nobody waits, and no
                # end would ever show that less is enough.
                own_margin = min(margin, max(0.0, (each_deadline - now) / 2))
                own_slack = each_deadline - _MARGIN - end
                slack, late = min(slack, own_slack), max(late, own_margin - own_slack)
                own_end = end if is_own else own_end
        return Forecast(own_end, slack, late)

    def rest_s(self) -> float:
        """Returns the seconds until all that wait would be answered."""
        fixed, of_sample, of_id = self._predictor.costs
        own = sum(of_sample * each.samples + of_id * each.ids for each in self._requests)
        longest = longest_batch(fixed, self.is_overloaded)
        return self._predictor.stretch * own * (1 + fixed / longest)

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
        del self._requests[: len(gone)]
        return gone

    def next_batch(self, now: float) -> list[Part]:
        """Removes the requests of the next batch, and returns them. Of one that takes longer than a
        batch may, it returns a part; the rest goes on waiting."""
        fixed, of_sample, of_id = self._predictor.costs
        stretch = self._predictor.stretch
        longest = longest_batch(fixed, self.is_overloaded)
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

    def _with(
        self, place: int, samples: int, ids: int, deadline: float
    ) -> Iterator[tuple[int, float, float]]:
        for number, each in enumerate(self._requests):
            if number == place:
                yield samples, ids, deadline
            yield each.samples, each.ids, each.deadline
        if place == len(self._requests):
            yield samples, ids, deadline


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
