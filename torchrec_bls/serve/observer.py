"""Counts of what a service does, for Prometheus and for its page. They need the optional package
prometheus_client."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.observe.prometheus import ServingCollector
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.predictor import Costs
from torchrec_bls.serve.status import Status
from torchrec_bls.serve.tally import Ended, Tally

_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_FRESHNESS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
_RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Observer:
    """Counts requests and batches of a worker.

    Args:
        state: function that returns what the worker serves, or None before its first batch.

    Attributes:
        tally: requests that have ended.
        freshness: seconds from the training to the worker's first batch, of the version that it
            changed to last; None: it has changed to none, or to one whose training is unknown.
    """

    def __init__(self, state: Callable[[], ServingState | None]) -> None:
        self.tally = Tally()
        self.freshness: float | None = None
        self._state = state
        # When the training had the newest weights of all batches so far; None: none had any.
        self._trained: float | None = None
        self._registry = CollectorRegistry()
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
        self._freshness = self._histogram(
            "freshness_seconds",
            "From a training's weights to the first batch with them, of this worker.",
            _FRESHNESS,
        )
        self._registry.register(_OutcomeCollector(self.tally.counts))
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
        self.tally.add(Ended(now, outcome, seconds))
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

    def changed_version(self) -> None:
        """Counts a version of which the first batch has just ended. What the worker began with is
        no news, and neither is an older version that is served again."""
        now, state = time.time(), self._state()
        if state is None or state.trained is None:
            return
        if self._trained is not None and state.trained > self._trained:
            # Negative where the clock of the training's host is ahead.
            self.freshness = max(0.0, now - state.trained)
            self._freshness.observe(self.freshness)
        self._trained = max(self._trained or 0.0, state.trained)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"torchrec_bls_{name}", text, buckets=buckets, registry=self._registry)


class WorkCollector(Collector):
    """Reports what a worker has to do, how long it expects that to take, what became of new
    checkpoints, and the supervisor's workers.

    Args:
        waiting: function that returns how many requests wait for a batch.
        costs: function that returns what a batch is expected to take.
        model_s: function that returns the seconds that the model has taken.
        status: function that returns what the supervisor has said.
    """

    def __init__(
        self,
        waiting: Callable[[], int],
        costs: Callable[[], Costs],
        model_s: Callable[[], float],
        status: Callable[[], Status],
    ) -> None:
        self._waiting = waiting
        self._costs = costs
        self._model_s = model_s
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Returns the present state."""
        yield GaugeMetricFamily(
            "torchrec_bls_requests_waiting",
            "Requests that wait for a batch.",
            value=self._waiting(),
        )
        yield CounterMetricFamily(
            "torchrec_bls_model_seconds",
            "Time that the model has taken, the warm-up included.",
            value=self._model_s(),
        )
        costs = GaugeMetricFamily(
            "torchrec_bls_predicted_cost_seconds",
            "Time that a batch is predicted to take, and more for each sample and each id.",
            labels=("of",),
        )
        for of, seconds in self._costs()._asdict().items():
            costs.add_metric((of,), seconds)
        yield costs
        status = self._status()
        refreshes = status.refreshes
        yield CounterMetricFamily(
            "torchrec_bls_failed_refreshes",
            "New checkpoints that could not be published.",
            value=refreshes.failed,
        )
        yield GaugeMetricFamily(
            "torchrec_bls_refresh_problem",
            "1 where the newest checkpoint is not served: the page and the log say why.",
            value=bool(refreshes.problem),
        )
        workers = GaugeMetricFamily(
            "torchrec_bls_workers", "Workers there are to be, and that answer.", labels=("state",)
        )
        workers.add_metric(("wanted",), status.workers)
        workers.add_metric(("ready",), status.ready)
        yield workers
        starts = CounterMetricFamily(
            "torchrec_bls_worker_starts", "Workers that have begun, by cause.", labels=("cause",)
        )
        for cause, count in status.starts.items():
            starts.add_metric((cause,), count)
        yield starts


class _OutcomeCollector(Collector):
    """Reports how many requests have ended in each way."""

    def __init__(self, counts: dict[Outcome, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "torchrec_bls_requests", "Requests by their outcome.", labels=("outcome",)
        )
        for outcome, count in self._counts.items():
            requests.add_metric((outcome.label,), count)
        yield requests
