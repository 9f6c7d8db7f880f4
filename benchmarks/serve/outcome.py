"""What became of the requests of one run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram

from benchmarks.harness import page
from benchmarks.serve.open_loop import GIVE_UP_S, MALFORMED, NOTHING, RESET, OpenLoop

#: Statuses by which servers refuse a request that would be late.
REFUSALS = (408, 429, 503, 504)
#: Of a server that decides when a request comes: 504 is one that it had admitted.
EARLY = (503,)
#: A run whose sends lag more than this at the 99th percentile says nothing of the server.
MOST_LAG_MS = 1.0
#: Of latencies of answers, shown.
PERCENTILES = (50, 99, 99.9)

_FAILURES = {RESET: "reset", NOTHING: f"nothing within {GIVE_UP_S:g} s", MALFORMED: "malformed"}
# Microseconds; with three digits.
_MOST_US, _DIGITS = round(2 * GIVE_UP_S * 1e6), 3


@dataclass(frozen=True)
class Outcome:
    """A run of the generator, counted.

    Attributes:
        rate: intended requests a second.
        seconds: in which they were to be sent.
        offered: number of intended requests.
        sent: number of those that went out.
        in_time: number of those answered with 200 by the deadline, counted from the intended send.
        late: number of those answered with 200 after it.
        refused: by status, number of those refused.
        failed: by reason, number of all others.
        lag_p99_ms: 99th percentile of the generator's own delay, where a connection was free.
        generator_s: CPU seconds of the generator.
        server_s: CPU seconds of the server's processes.
        histograms: HdrHistograms of latencies in us, as text: "200", and by status of refusals.
        kept: whole responses with status 200, with the index of their request.
    """

    rate: float
    seconds: float
    offered: int
    sent: int
    in_time: int
    late: int
    refused: dict[int, int]
    failed: dict[str, int]
    lag_p99_ms: float
    generator_s: float
    server_s: float
    histograms: dict[str, str]
    kept: list[tuple[int, bytes]] = field(repr=False)

    @property
    def void(self) -> bool:
        """Whether the generator itself was late."""
        return self.lag_p99_ms > MOST_LAG_MS

    @property
    def in_time_share(self) -> float:
        """Share of the intended requests that were answered in time."""
        return self.in_time / self.offered if self.offered else 1.0

    @property
    def in_time_rate(self) -> float:
        """Answers in time a second."""
        return self.in_time / self.seconds

    @property
    def late_share(self) -> float:
        """Share of the answers that were late."""
        answers = self.in_time + self.late
        return self.late / answers if answers else 0.0

    def latency_ms(self, percent: float, *statuses: int) -> float | None:
        """A percentile of the latencies of responses with one of these statuses; None: no such."""
        return latency_ms([self], percent, *statuses)

    def figures(self) -> dict[str, Any]:
        """All but the responses, and what follows from it, for a file."""
        counted = {name: value for name, value in vars(self).items() if name != "kept"}
        return {
            **counted,
            "refused": {str(status): count for status, count in self.refused.items()},
            "in_time_share": self.in_time_share,
            "in_time_rate": self.in_time_rate,
            "late_share": self.late_share,
            "answers_ms": {f"p{p:g}": self.latency_ms(p, 200) for p in PERCENTILES},
            "refusals_p99_ms": self.latency_ms(99, *REFUSALS),
            "void": self.void,
        }


def latency_ms(outcomes: Iterable[Outcome], percent: float, *statuses: int) -> float | None:
    """A percentile over several runs, of responses with one of these statuses; None: no such."""
    merged = HdrHistogram(1, _MOST_US, _DIGITS)
    for outcome in outcomes:
        for status in set(map(str, statuses)) & outcome.histograms.keys():
            merged.add(HdrHistogram.decode(outcome.histograms[status]))
    if not merged.get_total_count():
        return None
    return float(merged.get_value_at_percentile(percent)) / 1000


def outcome_of(
    loop: OpenLoop,
    rate: float,
    seconds: float,
    deadline_s: float,
    processor_s: tuple[float, float],
) -> Outcome:
    """Counts what a loop has noted; `processor_s` is that of the generator, and of the server."""
    status = np.array(loop.status)
    latency = np.array(loop.latency)
    answered = status == 200
    by_status = Counter(status.tolist())
    refused = {each: by_status.pop(each) for each in REFUSALS if each in by_status}
    by_status.pop(200, None)
    failed = {_FAILURES.get(each, f"status {each}"): count for each, count in by_status.items()}
    return Outcome(
        rate=rate,
        seconds=seconds,
        offered=len(status),
        sent=loop.sent,
        in_time=int((answered & (latency <= deadline_s)).sum()),
        late=int((answered & (latency > deadline_s)).sum()),
        refused=refused,
        failed=failed,
        lag_p99_ms=float(np.quantile(loop.lags, 0.99)) * 1000 if len(loop.lags) else 0.0,
        generator_s=processor_s[0],
        server_s=processor_s[1],
        histograms={
            str(each): _histogram(latency[status == each])
            for each in (200, *REFUSALS)
            if (status == each).any()
        },
        kept=loop.kept,
    )


def _histogram(latencies: Iterable[float]) -> str:
    histogram = HdrHistogram(1, _MOST_US, _DIGITS)
    for latency in latencies:
        histogram.record_value(min(max(round(latency * 1e6), 1), _MOST_US))
    encoded: bytes = histogram.encode()
    return encoded.decode()


def table(outcome: Outcome) -> str:
    """A run as a reader sees it."""
    rows: list[tuple[str, Any]] = [
        ("intended, a second", f"{outcome.rate:g}"),
        ("sent", f"{outcome.sent} of {outcome.offered}"),
        ("answered in time", f"{outcome.in_time} ({100 * outcome.in_time_share:.2f} %)"),
        ("answered late", f"{outcome.late} ({100 * outcome.late_share:.2f} % of the answers)"),
        *((f"refused with {status}", count) for status, count in outcome.refused.items()),
        *((f"failed: {reason}", count) for reason, count in outcome.failed.items()),
        *(
            (f"answers, p{percent:g}, ms", _shown(outcome.latency_ms(percent, 200)))
            for percent in PERCENTILES
        ),
        ("refusals, p99, ms", _shown(outcome.latency_ms(99, *REFUSALS))),
        ("lag of the generator, p99, ms", f"{outcome.lag_p99_ms:.3f}"),
        ("CPU of the generator, s", f"{outcome.generator_s:.2f}"),
        ("CPU of the server, s", f"{outcome.server_s:.2f}"),
    ]
    void = ["", f"void: the generator lagged more than {MOST_LAG_MS:g} ms"] if outcome.void else []
    return "\n".join([page.table(["", ""], rows), *void])


def _shown(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.2f}"
