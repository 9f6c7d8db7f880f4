"""A simulation of several bounds and codecs as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...html_page import page, table
from ...problem.job import Job
from ..bounds import BoundOutcome, Simulation
from ..engine.critical_path import Cause, causes
from .figure import curves_svg
from .text import COLUMNS, cells_of, notes_on, setting


def as_html(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> str:
    """Returns the page: the job, a table, throughput and memory by bound, and a table of times.

    The last table shows what took the time of the chosen outcome, or else of the last one.

    Args:
        outcomes: outcomes by bound and codec.
        chosen: the outcome to take, if one was asked for.
        job: job that was simulated.
        simulation: settings of the simulation.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = outcomes[-1] if chosen is None else chosen
    rows = [
        [*map(escape, cells), "take this" if each is chosen else ""]
        for each, cells in zip(outcomes, cells_of(outcomes), strict=True)
    ]
    parts = [
        f"<p>{escape(setting(job, simulation))}.</p>",
        *(f"<p>{escape(note)}</p>" for note in notes_on(job, simulation)),
        table([*COLUMNS, ""], rows),
        "<h2>Bounds</h2>",
        curves_svg(outcomes),
        f"<h2>Where the time goes at bound {shown.bound} with {escape(shown.codec)}</h2>",
        "<p>What had to end before the simulation could, ms a batch: work as on a core of its own, "
        "what sharing the core added, pauses and delays on no core, and arrivals that were waited "
        "for.</p>",
        _critical_path(shown, simulation),
    ]
    return page("Simulated steps", parts)


def _critical_path(outcome: BoundOutcome, simulation: Simulation) -> str:
    timeline = outcome.timeline
    threads = simulation.ranks.threads_of(timeline.graph)
    parts = causes(timeline)
    end = sum(cause.total for cause in parts.values())
    of_task: dict[str, Cause] = {}
    most_on: dict[str, int] = {}
    for (thread, name), cause in parts.items():  # the largest first
        of_task[name] = of_task.get(name, Cause()) + cause
        most_on.setdefault(name, threads[thread][0])
    rows = []
    for name, cause in sorted(of_task.items(), key=lambda item: -item[1].total):
        times = (cause.work, cause.sharing, cause.pause, cause.arrival, cause.total)
        in_ms = (f"{time / 1000 / simulation.batches:.3f}" for time in times)
        rows.append([escape(name), *in_ms, f"{cause.total / end:.1%}", f"rank {most_on[name]}"])
    head = ["task", "work", "sharing", "pause", "arrival", "together", "of all", "most on"]
    return table(head, rows)
