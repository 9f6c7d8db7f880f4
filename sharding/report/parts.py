"""A plan's report for people, as text and as a page."""

from collections.abc import Iterator, Sequence

from torchrec_bls.rendering import document
from torchrec_bls.rendering.document import Bar, Bars, Cell, Heading, Part, Table, Words

from ..cost_interface import Estimate
from ..search.infeasible import as_bytes
from .plan_outcome import SCOPE, Decision, PlanOutcome

_MANY_RANKS = 32
_NAME = 20


def as_text(report: PlanOutcome) -> str:
    """Returns the report: prediction, ranks, decisions, measurement. Of many ranks it has the
    slowest."""
    return document.as_text(_parts(report, _MANY_RANKS))


def as_html(report: PlanOutcome) -> str:
    """Returns the same of all ranks as a page."""
    return document.as_html("Sharding plan", _parts(report, len(report.rating.ranks)))


def _parts(report: PlanOutcome, most_ranks: int) -> Iterator[Part]:
    job, rating = report.job, report.rating
    mode = "training" if job.training else "inference"
    yield (
        f"Plan for {job.ranks} ranks ({job.host_ranks} a host), batch {job.batch} a rank, {mode}, "
        f"backend {job.backend}, bound {job.bound}"
    )
    bound = (
        f"{report.lower_bound_us:,.0f} us: at most {report.gap:.1%} better is possible in this "
        f"model{report.aside}"
    )
    rows = [
        ["Predicted step", _time(rating.step)],
        *([f"  {name}", _time(time)] for name, time in rating.phases.items()),
        ["Lower bound", bound],
        *([["Simulated step", report.simulated]] if report.simulated else []),
    ]
    yield Table([Words(), Words()], rows)
    yield f"A step: {SCOPE}."
    yield Heading("Ranks")
    yield from _ranks(report, most_ranks)
    yield Heading("Decisions")
    yield _decisions(report.decisions)
    if report.measured_us:
        yield Heading("Measured")
        yield _measured(report)


def _time(time: Estimate) -> str:
    return f"{time.microseconds:,.0f} us ({time.low:,.0f} to {time.high:,.0f})"


def _ranks(report: PlanOutcome, most: int) -> Iterator[Part]:
    every = list(enumerate(report.rating.ranks))
    shown = every
    if len(every) > most:
        shown = sorted(every, key=lambda entry: -entry[1].step.microseconds)[:most]
    rows: list[list[Cell]] = []
    for number, rank in shown:
        step, there = rank.step, report.job.memory_bytes[number]
        amounts = rank.compute.microseconds, rank.communication.microseconds
        rows.append(
            [
                str(number),
                f"{step.microseconds:,.0f}",
                f"{step.low:,.0f}-{step.high:,.0f}",
                Bar(amounts, (step.low, step.high)),
                as_bytes(rank.memory_bytes),
                f"{rank.memory_bytes / there:.0%}" if there else "",
                str(rank.shards),
            ]
        )
    bars = Bars(("compute", "communication"))
    yield Table(["rank", "us", "interval", bars, "memory", "of all", "shards"], rows)
    if len(shown) < len(every):
        fastest = min(rank.step.microseconds for _, rank in every)
        yield f"The {len(shown)} slowest of {len(every)}; the fastest takes {fastest:,.0f} us."


def _decisions(decisions: Sequence[Decision]) -> Table:
    return Table(
        [Words("table", most=_NAME), "rows x columns", Words("sharding"), Words("ranks")],
        [
            [one.table, f"{one.rows:,} x {one.dim}", one.choice, _short(one.ranks)]
            for one in decisions
        ],
        [
            f"{one.reason}; runner-up {one.runner_up}, {one.runner_up_us:+,.1f} us"
            if one.runner_up
            else one.reason
            for one in decisions
        ],
    )


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))


def _measured(report: PlanOutcome) -> Table:
    return Table(
        [Words(), "measured us", "predicted", "error", Words("in the interval")],
        [
            [
                name,
                f"{time:,.0f}",
                _time(predicted),
                f"{predicted.microseconds / time - 1:+.1%}",
                "yes" if predicted.low <= time <= predicted.high else "no",
            ]
            for name, predicted, time in report.compared()
        ],
    )
