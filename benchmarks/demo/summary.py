"""From the ranks' times to the lines of the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_bls import ChannelStats
from torchrec_bls.observe import StragglerReport, ideal_finish_times

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: what ran.
        bound: the bound k, or None where there is none: TorchRec on gloo, and direct reads.
        step_ms: mean over runs and ranks of a rank's mean time from one batch to the next.
        step_ci_ms: half width of its 95 % confidence interval.
        answer_ms: median over all batches of the time from the start of a batch's step to its
            logits: with a bound of k, about 2k + 1 steps.
        throughput: batches a second, added up over the ranks, mean over runs.
        throughput_ci: half width of its 95 % confidence interval; NaN for a single run.
        wait_share: part of the ranks' time spent waiting for peers, or None if not known.
        ideal_ms: time a batch of a free exchange that keeps the bound, or None.
        max_difference: largest |logit - TorchRec's logit|.
        equals_torchrec: whether all logits are TorchRec's, bit for bit.
        equals_first_bound: whether all logits are those of the first bound, bit for bit.
        ring_bytes: slot memory of a rank.
        pulled: messages that did not fit a slot, over all ranks.
        waiting: who waited for whom, or None if not known.
    """

    name: str
    bound: int | None
    step_ms: float
    step_ci_ms: float
    answer_ms: float
    throughput: float
    throughput_ci: float
    wait_share: float | None
    ideal_ms: float | None
    max_difference: float
    equals_torchrec: bool
    equals_first_bound: bool
    ring_bytes: int
    pulled: int
    waiting: StragglerReport | None = None


def summarize(entry: dict[str, Any]) -> Line:
    """Sums up one variant.

    Times and throughput are as in the BLS paper, sec. V-C. L(i, j) is the mean time of a step of
    run i on rank j. The paper calls the mean of all L(i, j) latency. The throughput is the mean
    over i of the sum over j of 1 / L(i, j).

    Args:
        entry: ``name``, ``bound`` and ``ranks``, the ``RankResult`` of each rank as a dict.
    """
    ranks = entry["ranks"]
    bound = entry["bound"]
    runs = list(zip(*(rank["times"] for rank in ranks), strict=True))
    steps = len(runs[0][0]["own"]) - 1
    step_times = [[times["total"] / steps for times in run] for run in runs]
    throughputs = [sum(1 / step for step in run) for run in step_times]
    step_ms, step_ci_ms = mean_and_interval([1e3 * value for run in step_times for value in run])
    throughput, throughput_ci = mean_and_interval(throughputs)
    channels = [[ChannelStats(**one) for one in rank["channels"]] for rank in ranks]
    wait_share = ideal_ms = None
    if bound is not None:
        everything = [times for run in runs for times in run]
        wait_share = sum(t["waited"] for t in everything) / sum(t["total"] for t in everything)
        ideal_ms = 1e3 * statistics.fmean(_ideal_seconds(run, bound) for run in runs) / steps
    return Line(
        name=entry["name"],
        bound=bound,
        step_ms=step_ms,
        step_ci_ms=step_ci_ms,
        answer_ms=1e3
        * statistics.median(s for run in runs for times in run for s in times["answered"]),
        throughput=throughput,
        throughput_ci=throughput_ci,
        wait_share=wait_share,
        ideal_ms=ideal_ms,
        max_difference=max(rank["max_difference"] for rank in ranks),
        equals_torchrec=all(rank["equals_torchrec"] for rank in ranks),
        equals_first_bound=all(rank["equals_first_bound"] for rank in ranks),
        ring_bytes=max(sum(one.ring_bytes for one in rank) for rank in channels),
        pulled=sum(one.pulled_messages for rank in channels for one in rank),
        waiting=StragglerReport.of(channels) if any(channels) else None,
    )


def _ideal_seconds(run: Sequence[dict[str, Any]], bound: int) -> float:
    """Mean over the ranks of the time from start to end with a free exchange.

    Delays, work and the moments at which the ranks started are the run's own. In the end a rank
    needs the last post of every rank, whatever the bound.
    """
    started = np.array([times["started"] for times in run])
    late = started - started.min()
    before = np.array([times["slept"][:-1] for times in run])
    before[:, 0] += late
    own = np.array([times["own"] for times in run])
    finish = ideal_finish_times(before, bound, own[:, :-1])
    last_start = finish[:, -2] if finish.shape[1] > 1 else 0.0
    last_post = (last_start + before[:, -1]).max()
    end = np.maximum(finish[:, -1] + own[:, -1], last_post)
    return float((end - late).mean())


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the half width of its 95 % interval (Student's t; NaN for one value)."""
    if len(values) == 1:
        return values[0], math.nan
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def wrong_results(lines: Sequence[Line]) -> list[str]:
    """Says in words which lines have wrong results; empty if all is well."""
    first = next((line.name for line in lines if line.bound is not None), "")
    problems = []
    for line in lines:
        if not line.equals_torchrec:
            problems.append(
                f"{line.name}: logits differ from the first run of TorchRec on gloo "
                f"by up to {line.max_difference:.3g}"
            )
        if not line.equals_first_bound:
            problems.append(f"{line.name}: logits are not bit-identical to those of {first}")
    return problems
