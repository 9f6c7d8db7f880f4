"""A plan's report as text of at most 100 columns."""

import textwrap
from collections.abc import Sequence

from ..cost_interface import Estimate
from ..search.infeasible import as_bytes
from .plan_outcome import SCOPE, Decision, PlanOutcome

WIDTH = 100
_BAR = 40
_MANY_RANKS = 32


def as_text(report: PlanOutcome) -> str:
    """Returns the report: prediction, ranks, decisions, measurement."""
    job = report.job
    mode = "training" if job.training else "inference"
    lines = [
        f"Plan for {job.ranks} ranks ({job.host_ranks} a host), batch {job.batch} a rank, {mode}, "
        f"backend {job.backend}, bound {job.bound}",
        "",
        f"Predicted step   {_time(report.rating.step)}",
        f"  {SCOPE}",
    ]
    if report.caveat:
        lines.append(f"  {report.caveat}")
    lines += [f"  {name:<14} {_time(time)}" for name, time in report.rating.phases.items()]
    lines += [
        f"Lower bound      {report.lower_bound_us:,.0f} us: at most {report.gap:.1%} better is "
        f"possible in this model{report.aside}",
        *([f"Simulated step   {report.simulated}"] if report.simulated else []),
        "",
        *_ranks(report),
        "",
        *_decisions(report.decisions),
    ]
    if report.measured_us:
        lines += ["", *_measured(report)]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 6) or [""]


def _time(time: Estimate) -> str:
    return f"{time.microseconds:,.0f} us ({time.low:,.0f} to {time.high:,.0f})"


def _ranks(report: PlanOutcome) -> list[str]:
    each = list(enumerate(report.rating.ranks))
    most = max(rank.step.microseconds for _, rank in each) or 1.0
    shown = each
    if len(each) > _MANY_RANKS:
        shown = sorted(each, key=lambda entry: -entry[1].step.microseconds)[:_MANY_RANKS]
    lines = [
        f"{'rank':>4} {'us':>10} {'interval':>21}  {'# compute  = communication':<{_BAR}} "
        f"{'memory':>12} {'shards':>6}"
    ]
    for number, rank in shown:
        compute = round(rank.compute.microseconds / most * _BAR)
        whole = round(rank.step.microseconds / most * _BAR)
        bar = "#" * compute + "=" * (whole - compute)
        step = rank.step
        lines.append(
            f"{number:>4} {step.microseconds:>10,.0f} {f'{step.low:,.0f}-{step.high:,.0f}':>21}  "
            f"{bar:<{_BAR}} {as_bytes(rank.memory_bytes):>12} {rank.shards:>6}"
        )
    if len(shown) < len(each):
        fastest = min(rank.step.microseconds for _, rank in each)
        lines.append(
            f"     ... the {len(shown)} slowest of {len(each)}; the fastest takes {fastest:,.0f} us"
        )
    return lines


def _decisions(decisions: Sequence[Decision]) -> list[str]:
    lines = [f"{'table':<20} {'rows x columns':>17}  {'sharding':<34} ranks"]
    for one in decisions:
        name = one.table if len(one.table) <= 20 else one.table[:17] + "..."
        lines.append(
            f"{name:<20} {f'{one.rows:,} x {one.dim}':>17}  {one.choice:<34} {_short(one.ranks)}"
        )
        instead = (
            f"; runner-up {one.runner_up}, {one.runner_up_us:+,.1f} us" if one.runner_up else ""
        )
        lines.append(f"    {one.reason}{instead}")
    return lines


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    text = " ".join(str(rank) for rank in ranks)
    return text if len(text) <= 24 else text[:21] + "..."


def _measured(report: PlanOutcome) -> list[str]:
    lines = [f"{'measured':<16} {'us':>12} {'predicted us':>34} {'error':>8}  in the interval"]
    for name, predicted, time in report.compared():
        error = predicted.microseconds / time - 1
        inside = "yes" if predicted.low <= time <= predicted.high else "no"
        lines.append(f"{name:<16} {time:>12,.0f} {_time(predicted):>34} {error:>+8.1%}  {inside}")
    return lines
