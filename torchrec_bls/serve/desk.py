"""What both protocols do with a request: admit it, have it answered, and count how it ended."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_bls.serve.access_log import AccessLog
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.heads import RequestHead
from torchrec_bls.serve.inputs import Features, Layout
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.waiting import Answer, Request

# Outcomes of requests whose ends tell how good predictions are.
_BY_TIME = Outcome.OK, Outcome.LATE, Outcome.EXPIRED
#: Header by which the front says when a request came to it.
AT_FRONT = "x-arrived-us"
# Seconds that a request may have been at the front. More are a clock that was set meanwhile.
_LONGEST = 60.0


class Ticket:
    """A request on its way. It is a context manager, which counts how the request ended: as the
    exception says that leaves the context, or as answered.

    Args:
        desk: where it came in.
        protocol: "http" or "grpc".
        arrived: moment of its arrival, in seconds of `time.monotonic()`.

    Attributes:
        protocol: see above.
        arrived: see above.
        samples: its samples; 0 as long as they are not known.
        deadline: its deadline; infinite as long as that is not known.
        predicted: predicted moment of its end, once it is admitted.
        queue_s: seconds that it waited for its batch, once it is answered.
        behind_s: seconds that those behind it in its batch were to take.
    """

    def __init__(self, desk: "Desk", protocol: str, arrived: float) -> None:
        self._desk = desk
        self._engine = desk.engine
        self._layout: Layout | None = None
        self._request: Request | None = None
        self._version = ""
        self._has_left = False
        self.protocol = protocol
        self.arrived = arrived
        self.samples = 0
        self.deadline = float("inf")
        self.predicted: float | None = None
        self.queue_s: float | None = None
        self.behind_s = 0.0

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            is_late = time.monotonic() > self.deadline
            outcome = Outcome.LATE if is_late else Outcome.OK
        elif isinstance(error, RequestError):
            outcome = error.outcome
        else:
            outcome = Outcome.FAILED if isinstance(error, Exception) else Outcome.GONE
        self._desk.ended(self, outcome)

    def admit(self, head: RequestHead) -> None:
        """Decides by its head whether it can be answered in time.

        Raises:
            RequestError: it can't, or does not fit the model.
        """
        self._check_version(head.version)
        self._version = head.version
        self._layout = layout = self._engine.inputs.layout(head)
        self.samples = layout.samples
        self.deadline = self._engine.deadline(self.arrived, head.timeout_us)
        self.check()

    def check(self) -> None:
        """Decides whether what was admitted can still be answered in time.

        Raises:
            RequestError: it can't.
        """
        assert self._layout is not None
        self.predicted = self._engine.check(self._layout.samples, self._layout.ids, self.deadline)

    async def answer(self, contents: Sequence[NDArray[Any]]) -> Answer:
        """Returns the answer of the model.

        Args:
            contents: elements of each tensor of its head, [elements].

        Raises:
            RequestError: they do not fit, or it gets no scores.
        """
        layout = self._layout
        assert layout is not None
        features = self._engine.inputs.read(layout, contents)
        if self._has_left:
            raise _gone()
        asked = features if features.samples else _one_sample(features)
        self._request = self._engine.submit(asked, self.deadline, self.arrived)
        answer = await self._request.answer
        self._check_version(self._version, answer.version)
        self.queue_s, self.behind_s = answer.queue_s, answer.behind_s
        if features.samples:
            return answer
        return answer._replace(outputs={name: each[:0] for name, each in answer.outputs.items()})

    def leave(self) -> None:
        """Takes the request back: its caller has left."""
        self._has_left = True
        if self._request is not None and not self._request.answer.done():
            self._request.answer.set_exception(_gone())

    def _check_version(self, asked: str, served: str | None = None) -> None:
        served = self._engine.version if served is None else served
        if asked not in ("", served):
            raise RequestError(
                Outcome.UNKNOWN, f"version '{asked}' is not served, but '{served}' is"
            )


class Desk:
    """Where requests of both protocols come in.

    Args:
        engine: engine that answers them.
        observer: counts of how they ended.
        log: log of requests, or None.
        has_front: whether all requests come through a front.

    Attributes:
        engine: see above.
        has_front: see above.
    """

    def __init__(
        self, engine: Engine, observer: Observer, log: AccessLog | None, *, has_front: bool
    ) -> None:
        self.engine = engine
        self.has_front = has_front
        self._last_arrival = 0.0
        self._observer = observer
        self._log = log

    def request(self, protocol: str, arrived: float, at_front: str = "") -> Ticket:
        """Returns the ticket of a request.

        Args:
            protocol: "http" or "grpc".
            arrived: moment of its arrival here, in seconds of `time.monotonic()`.
            at_front: microseconds since 1970 at which it came to the front, of AT_FRONT.
        """
        self._last_arrival = time.monotonic()
        return Ticket(self, protocol, self._arrival(arrived, at_front))

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """Counts how a request ended."""
        self._observer.ended(outcome, ticket.arrived, ticket.queue_s)
        if outcome is Outcome.REFUSED or outcome in _BY_TIME:
            self.engine.decided(is_refused=outcome is Outcome.REFUSED)
        if ticket.predicted is not None and outcome in _BY_TIME:
            self.engine.ended(ticket.predicted + ticket.behind_s)
        if self._log is not None:
            seconds = time.monotonic() - ticket.arrived
            self._log.write(ticket.protocol, outcome, seconds, ticket.samples, ticket.queue_s)

    async def await_quiet(self, seconds: float, most: float) -> None:
        """Waits until no request has come for a while from now on.

        Args:
            seconds: how long.
            most: seconds that it waits at most.
        """
        now = began = time.monotonic()
        while (left := min(max(began, self._last_arrival) + seconds, began + most) - now) > 0:
            await asyncio.sleep(left)
            now = time.monotonic()

    def _arrival(self, here: float, at_front: str) -> float:
        if not (self.has_front and at_front.isascii() and at_front.isdigit()):
            return here
        waited = time.time() - int(at_front) / 1e6
        return time.monotonic() - waited if 0 <= waited < _LONGEST else here


def _one_sample(empty: Features) -> Features:
    """Returns features of one sample without ids. Its outputs have the shape of the model's."""
    keys = len(empty.counts)
    dense = empty.dense
    return Features(
        1,
        None if dense is None else np.zeros((1, dense.shape[1]), dtype=np.float32),
        np.zeros(0, dtype=np.int64),
        np.zeros(keys, dtype=np.int32),
        None if empty.weights is None else np.zeros(0, dtype=np.float32),
        np.zeros(keys, dtype=np.int64),
        (False,) * keys,
    )


def _gone() -> RequestError:
    return RequestError(Outcome.GONE, "the caller has left")
