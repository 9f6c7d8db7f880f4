"""Counts of what a service does, for Prometheus and for its page. They need the optional package
prometheus_client."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.observe.prometheus import ServingCollector
from torchrec_bls.serve.outcomes import Outcome

_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# Requests whose latencies the page shows.
_SHOWN = 2048


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        moment: when, in seconds of `time.monotonic()`.
        outcome: how.
        seconds: since its arrival.
    """

    moment: float
    outcome: Outcome
    seconds: float


class Observer:
    """Counts requests and batches of a process.

    Args:
        state: function that returns what the process serves, or None before its first batch.

    Attributes:
        last: the last requests that have ended, the newest last.
    """

    def __init__(self, state: Callable[[], ServingState | None]) -> None:
        self.last: deque[Ended] = deque(maxlen=_SHOWN)
        self._registry = CollectorRegistry()
        requests = Counter(
            "torchrec_bls_requests",
            "Requests by their outcome.",
            ["outcome"],
            registry=self._registry,
        )
        self._requests = {each: requests.labels(each.label) for each in Outcome}
        self._seconds = self._histogram(
            "request_seconds", "From the arrival of an answered request to its answer.", _SECONDS
        )
        self._queue = self._histogram(
            "queue_seconds", "From the arrival of an answered request to its batch.", _SECONDS
        )
        self._samples = self._histogram("batch_samples", "Samples of a batch.", _SAMPLES)
        self._predicted = self._histogram(
            "batch_seconds_over_predicted", "Time of a batch over its prediction.", _RATIOS
        )
        self._registry.register(ServingCollector(state))

    def add(self, collector: Collector) -> None:
        """Adds metrics of others."""
        self._registry.register(collector)

    def ended(self, outcome: Outcome, arrived: float, queue_s: float | None = None) -> None:
        """Counts a request that has ended.

        Args:
            outcome: how it ended.
            arrived: moment of its arrival.
            queue_s: seconds that it waited for its batch, if it was answered.
        """
        now = time.monotonic()
        seconds = now - arrived
        self._requests[outcome].inc()
        self.last.append(Ended(now, outcome, seconds))
        if queue_s is not None:
            self._seconds.observe(seconds)
            self._queue.observe(queue_s)

    def batch(self, samples: int, seconds: float, predicted: float) -> None:
        """Counts a batch.

        Args:
            samples: its samples.
            seconds: how long it took.
            predicted: how long it was to take.
        """
        self._samples.observe(samples)
        self._predicted.observe(seconds / predicted if predicted > 0 else 1.0)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"torchrec_bls_{name}", text, buckets=buckets, registry=self._registry)
