"""A plan's report as one HTML page that loads nothing from elsewhere."""

from html import escape

from ..cost_interface import Estimate
from ..html_page import page, table
from ..search.infeasible import as_bytes
from .plan_outcome import SCOPE, PlanOutcome

_STYLE = """
.bar { display: flex; width: 32em; height: 1.1em; position: relative }
.compute { background: #4878a8 } .communication { background: #e0904a }
.memory { background: #7aa874; height: 1.1em }
.interval { position: absolute; top: .5em; height: 2px; background: #333 }
"""


def as_html(report: PlanOutcome) -> str:
    """Returns the page: the prediction, a bar a rank, the decisions, the measurement."""
    job = report.job
    mode = "training" if job.training else "inference"
    parts = [
        f"<p>{job.ranks} ranks ({job.host_ranks} a host), batch {job.batch} a rank, {mode}, "
        f"backend {escape(job.backend)}, bound {job.bound}.</p>",
        f"<p>Predicted step <b>{_time(report.rating.step)}</b>: {SCOPE}. Lower bound "
        f"{report.lower_bound_us:,.0f} &micro;s, so at most {report.gap:.1%} better is possible in "
        f"this model{report.aside}.</p>",
        f"<p>Simulated step {escape(report.simulated)}.</p>" if report.simulated else "",
        f"<p><b>{escape(report.caveat)}</b></p>" if report.caveat else "",
        table(
            ["phase", "predicted"],
            [[escape(name), _time(time)] for name, time in report.rating.phases.items()],
        ),
        "<h2>Ranks</h2><p><span class=compute>&emsp;</span> compute "
        "<span class=communication>&emsp;</span> communication, line: interval of the sum; "
        "<span class=memory>&emsp;</span> memory of what there is</p>",
        _ranks(report),
        "<h2>Decisions</h2>",
        table(
            [
                "table",
                "rows",
                "columns",
                "sharding",
                "ranks",
                "reason",
                "runner-up",
                "adds &micro;s",
            ],
            [
                [
                    escape(one.table),
                    f"{one.rows:,}",
                    str(one.dim),
                    escape(one.choice),
                    " ".join(str(rank) for rank in one.ranks),
                    escape(one.reason),
                    escape(one.runner_up or ""),
                    f"{one.runner_up_us:+,.1f}" if one.runner_up else "",
                ]
                for one in report.decisions
            ],
        ),
    ]
    if report.measured_us:
        parts += [
            "<h2>Measured</h2>",
            table(
                ["", "measured &micro;s", "predicted", "error"],
                [
                    [
                        escape(name),
                        f"{time:,.0f}",
                        _time(predicted),
                        f"{predicted.microseconds / time - 1:+.1%}",
                    ]
                    for name, predicted, time in report.compared()
                ],
            ),
        ]
    return page("Sharding plan", parts, _STYLE)


def _time(time: Estimate) -> str:
    return f"{time.microseconds:,.0f} &micro;s ({time.low:,.0f} to {time.high:,.0f})"


def _ranks(report: PlanOutcome) -> str:
    most = max(rank.step.high for rank in report.rating.ranks) or 1.0
    rows = []
    for number, rank in enumerate(report.rating.ranks):
        step, there = rank.step, report.job.memory_bytes[number]
        bar = (
            "<div class=bar>"
            f"<div class=compute style='width:{rank.compute.microseconds / most:.1%}'></div>"
            f"<div class=communication style='width:{rank.communication.microseconds / most:.1%}'>"
            f"</div><div class=interval style='left:{step.low / most:.1%};"
            f"width:{(step.high - step.low) / most:.1%}'></div></div>"
        )
        used = min(rank.memory_bytes / there, 1.0) if there else 0.0
        memory = f"<div style='width:10em'><div class=memory style='width:{used:.1%}'></div></div>"
        rows.append(
            [str(number), bar, _time(step), memory, as_bytes(rank.memory_bytes), str(rank.shards)]
        )
    return table(["rank", "time", "", "memory", "", "shards"], rows)
