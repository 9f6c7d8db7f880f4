"""Counters of channels and of serving for Prometheus. They need the optional package
prometheus_client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.direct.serving.serving_state import ServingState

try:
    from prometheus_client import Metric
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "torchrec_bls.observe.prometheus needs prometheus_client: "
        "pip install 'torchrec-bls[prometheus]' (or pip install prometheus-client)"
    ) from error

__all__ = ["ChannelCollector", "ServingCollector"]

_CHANNEL = ("channel", "rank")


class ChannelCollector(Collector):
    """Reads this rank's channels whenever Prometheus asks. In between it costs nothing.

        REGISTRY.register(ChannelCollector(lambda: bounded_lag_channels(model)))
        start_http_server(9400 + rank)

    The rank that holds the others up is the one that waits least:
    `bottomk(1, sum by (rank) (rate(torchrec_bls_wait_seconds_total[5m])))`.

    Args:
        channels: function that returns the channels made so far; their names must differ.
    """

    def __init__(self, channels: Callable[[], Iterable[BoundedLagChannel]]) -> None:
        self._channels = channels

    def collect(self) -> Iterator[Metric]:
        """Returns the counters since the channels were made.

        Raises:
            ValueError: two channels have one name.
        """
        messages = CounterMetricFamily(
            "torchrec_bls_messages", "Messages sent to other ranks.", labels=_CHANNEL
        )
        sent = CounterMetricFamily(
            "torchrec_bls_sent_bytes", "Payload of these messages.", labels=_CHANNEL
        )
        pulled = CounterMetricFamily(
            "torchrec_bls_pulled_messages", "Messages larger than a slot.", labels=_CHANNEL
        )
        waited = CounterMetricFamily(
            "torchrec_bls_wait_seconds", "Time waited for each peer.", labels=(*_CHANNEL, "peer")
        )
        lag = HistogramMetricFamily(
            "torchrec_bls_lag_iterations",
            "Iterations that this rank was ahead of a peer when it waited.",
            labels=_CHANNEL,
        )
        channels = list(self._channels())
        names = Counter(channel.name for channel in channels)
        repeated = sorted(name for name, count in names.items() if count > 1)
        if repeated:
            raise ValueError(f"several channels are named {repeated}: give each a name of its own")
        for channel in channels:
            stats = channel.stats()
            labels = (channel.name, str(channel.rank))
            messages.add_metric(labels, stats.messages)
            sent.add_metric(labels, stats.bytes)
            pulled.add_metric(labels, stats.pulled_messages)
            for peer, seconds in enumerate(stats.wait_seconds):
                if peer != channel.rank:
                    waited.add_metric((*labels, str(peer)), seconds)
            *limits, _ = (f"{bucket}.0" for bucket in range(len(stats.lag_histogram)))
            lag.add_metric(
                labels,
                list(zip([*limits, "+Inf"], accumulate(stats.lag_histogram), strict=True)),
                sum(bucket * count for bucket, count in enumerate(stats.lag_histogram)),
            )
        yield from (messages, sent, pulled, waited, lag)


class ServingCollector(Collector):
    """Reports which version this process serves, how old it is, which owners are gone or late, and
    which readers hold an older one.

        REGISTRY.register(ServingCollector(lambda: serving_state(model)))

    The label `process` is the rank whose tables the process publishes, or "reader". This shows
    tables that are served without their owner: `max by (owner) (torchrec_bls_owner_gone) > 0`.
    The facts of a publication have no samples for a version that nobody has published.

    Args:
        state: function that returns the serving state; None before the first batch.
    """

    def __init__(self, state: Callable[[], ServingState | None]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Returns the present state."""
        version = InfoMetricFamily(
            "torchrec_bls_version",
            "Version of the weights of the last batch.",
            labels=("process",),
        )
        serial = GaugeMetricFamily(
            "torchrec_bls_version_serial",
            "How many versions have served, up to that of the last batch.",
            labels=("process",),
        )
        published = GaugeMetricFamily(
            "torchrec_bls_version_published_timestamp_seconds",
            "When the version of the last batch was published.",
            labels=("process",),
        )
        trained = GaugeMetricFamily(
            "torchrec_bls_version_trained_timestamp_seconds",
            "When a training had the weights of the version of the last batch.",
            labels=("process",),
        )
        took = GaugeMetricFamily(
            "torchrec_bls_publish_seconds",
            "Time that the publication of the version of the last batch took its slowest owner.",
            labels=("process",),
        )
        written = GaugeMetricFamily(
            "torchrec_bls_version_written_bytes",
            "Bytes of the tables of the version of the last batch that were written.",
            labels=("process",),
        )
        reused = GaugeMetricFamily(
            "torchrec_bls_version_reused_bytes",
            "Bytes of these tables that are those of the version before.",
            labels=("process",),
        )
        failed = CounterMetricFamily(
            "torchrec_bls_failed_publishes",
            "Calls of publish that have raised in this process.",
            labels=("process",),
        )
        announced = GaugeMetricFamily(
            "torchrec_bls_version_serial_announced",
            "How many versions have served, up to the last one that all owners have announced.",
            labels=("process",),
        )
        missing = GaugeMetricFamily(
            "torchrec_bls_owner_missing",
            "1 where an owner has not announced any version, while others wait with theirs.",
            labels=("process", "owner"),
        )
        gone = GaugeMetricFamily(
            "torchrec_bls_owner_gone",
            "1 where the tables of a rank are served although no living process publishes for it.",
            labels=("process", "owner"),
        )
        readers = GaugeMetricFamily(
            "torchrec_bls_readers",
            "Living processes that read these tables, this one among them.",
            labels=("process",),
        )
        behind = GaugeMetricFamily(
            "torchrec_bls_readers_behind",
            "Readers that have an older version than the announced one in memory.",
            labels=("process",),
        )
        uncounted = GaugeMetricFamily(
            "torchrec_bls_reader_uncounted",
            "1 where this process is not among the readers, since there are too many.",
            labels=("process",),
        )
        drained = GaugeMetricFamily(
            "torchrec_bls_drained",
            "1 where no version serves while one is made, on a host that can't hold two.",
            labels=("process",),
        )
        small = GaugeMetricFamily(
            "torchrec_bls_version_small_page_bytes",
            "Bytes of these tables in pages of 4 KiB that were asked for in pages of 2 MiB.",
            labels=("process",),
        )
        rows = CounterMetricFamily(
            "torchrec_bls_rows_read",
            "Rows that batches of this process have read of the shards of a rank.",
            labels=("process", "owner"),
        )
        refused = CounterMetricFamily(
            "torchrec_bls_refused_batches",
            "Batches that did not fit their module: an id out of range, a wrong key.",
            labels=("process",),
        )
        replaced = CounterMetricFamily(
            "torchrec_bls_replaced_ids",
            'Ids that row 0 was looked up for, with bad_ids="row0".',
            labels=("process",),
        )
        state = self._state()
        if state is not None:
            process = "reader" if state.rank is None else str(state.rank)
            version.add_metric((process,), {"version": state.version})
            serial.add_metric((process,), state.serial)
            announced.add_metric((process,), state.announced_serial)
            readers.add_metric((process,), len(state.readers))
            behind.add_metric((process,), len(state.readers_behind))
            uncounted.add_metric((process,), state.uncounted)
            failed.add_metric((process,), state.failed_publishes)
            drained.add_metric((process,), bool(state.drained_for))
            small.add_metric((process,), state.small_page_bytes)
            for family, fact in (
                (published, state.published),
                (trained, state.trained),
                (took, state.publish_seconds),
                (written, state.bytes_written),
                (reused, state.bytes_reused),
            ):
                if fact is not None:
                    family.add_metric((process,), fact)
            refused.add_metric((process,), state.refused_batches)
            replaced.add_metric((process,), state.replaced_ids)
            for owner, rows_read in enumerate(state.rows_read):
                gone.add_metric((process, str(owner)), owner in state.owners_gone)
                missing.add_metric((process, str(owner)), owner in state.missing)
                rows.add_metric((process, str(owner)), rows_read)
        yield from (version, serial, published, trained, took, written, reused, failed)
        yield from (announced, missing, gone, readers, behind, uncounted, drained, small)
        yield from (rows, refused, replaced)
