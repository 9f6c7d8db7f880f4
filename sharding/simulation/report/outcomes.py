"""A simulation of several bounds and codecs, as text, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torchrec_bls.rendering import document
from torchrec_bls.rendering.chart import Curves, charts
from torchrec_bls.rendering.document import Drawing, Heading, Part, Table, Words

from ...problem.job import Job
from ..bounds import BoundOutcome, Simulation
from ..engine.critical_path import Cause, causes
from ..wire.codecs import FP32
from ..wire.link import Link

FORMAT = 1
#: What a simulated step holds.
SCOPE = "lookups and exchanges, and of the rest what the options give"
WHOLE = "whole steps with host costs of the profile; of dense layers what the options give"
_VALIDATED_RANKS = 8
_GIB = 2**30
_US = 1e6  # in a second
_GBIT_PER_BYTE_A_US = 8e-3
#: Beside the outcome to take.
TAKEN = "<- take this"
_COLUMNS = (
    *("bound", Words("codec"), "step ms", "p50", "p95", "p99", "times faster"),
    *("latency ms", "GiB a rank", "MB of embeddings", Words()),
)


def notes_on(job: Job, simulation: Simulation) -> list[str]:
    """Returns what people need to know about the figures."""
    notes = [f"Simulated: {SCOPE if simulation.host is None else WHOLE}."]
    if any(codec != FP32 for codec in simulation.codecs):
        notes.append("Codecs are of embeddings; their gradients travel as float32.")
    link = simulation.ranks.link
    if link is not None and link.within:
        notes.append("All ranks are on one host: what they send each other passes the link.")
    if job.ranks > _VALIDATED_RANKS:
        notes.append(f"{job.ranks} ranks: extrapolated, not validated.")
    return notes


def setting(job: Job, simulation: Simulation) -> str:
    """Returns in a line what was simulated."""
    kind = "training" if job.training else "inference"
    ranks = simulation.ranks
    hosts = "1 host" if len(ranks.cores) == 1 else f"{len(ranks.cores)} hosts"
    link = "" if ranks.link is None else f"{_link_text(ranks.link)} for each host, "
    return (
        f"{job.ranks} ranks on {hosts} of {ranks.cores[0]} cores, {link}"
        f"{kind} over {job.backend}, delays {simulation.delays.text}, {simulation.batches} batches"
    )


def _link_text(link: Link) -> str:
    burst = f" with bursts of {link.burst_bytes / 1024:g} KiB" if link.burst_bytes else ""
    return f"a link of {link.bytes_per_us * _GBIT_PER_BYTE_A_US:g} Gbit/s{burst}"


def _gbit(simulation: Simulation) -> float | None:
    link = simulation.ranks.link
    return None if link is None else link.bytes_per_us * _GBIT_PER_BYTE_A_US


def as_text(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> str:
    """Returns the job and a line for each bound and codec.

    Args:
        outcomes: outcomes by bound and codec.
        chosen: the outcome to take, if one was asked for.
        job: job that was simulated.
        simulation: settings of the simulation.
    """
    return document.as_text(_parts(outcomes, chosen, job, simulation))


def as_html(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> str:
    """Returns the same as a page, with throughput, latency and memory by bound, and a table of
    times.

    This table shows what took the time of the chosen outcome, or else of the last one. Arguments
    are those of `as_text`.
    """
    shown = outcomes[-1] if chosen is None else chosen
    parts = [
        *_parts(outcomes, chosen, job, simulation),
        Heading("Bounds"),
        _curves(outcomes),
        Heading(f"Where the time goes at bound {shown.bound} with {shown.codec}"),
        "What the end of the run waited for, ms a batch. Work counts as on a core of its own, and "
        "sharing is what other threads of that core added. A pause is time on no core, such as a "
        "delay, and an arrival what another rank sent.",
        _critical_path(shown, simulation.batches),
    ]
    return document.as_html("Simulated steps", parts)


def _parts(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> list[Part]:
    rows = [
        [
            str(each.bound),
            each.codec,
            f"{each.step_us / 1000:.3f}",
            *(f"{time / 1000:.2f}" for time in each.step_percentiles_us),
            f"{outcomes[0].step_us / each.step_us:.2f}",
            f"{each.latency_us / 1000:.2f}",
            f"{each.memory_bytes / _GIB:.3f}",
            f"{each.embedding_bytes / 1e6:.2f}",
            TAKEN if each is chosen else "",
        ]
        for each in outcomes
    ]
    marked = next((row for row, each in enumerate(outcomes) if each is chosen), None)
    table = Table(_COLUMNS, rows, marked=marked)
    return [setting(job, simulation), table, *notes_on(job, simulation)]


def _curves(outcomes: Sequence[BoundOutcome]) -> Drawing:
    """Returns steps a second, latency and memory by bound, with a curve for each codec."""
    of_codec = {
        codec: sorted((each for each in outcomes if each.codec == codec), key=lambda o: o.bound)
        for codec in dict.fromkeys(each.codec for each in outcomes)
    }

    def curves(title: str, value_of: Callable[[BoundOutcome], float]) -> Curves:
        points = {
            codec: [(each.bound, value_of(each)) for each in own] for codec, own in of_codec.items()
        }
        return Curves("bound", title, points)

    return charts(
        curves("steps a second", lambda each: _US / each.step_us),
        curves("latency of a batch, ms", lambda each: each.latency_us / 1000),
        curves("GiB of the fullest rank", lambda each: each.memory_bytes / _GIB),
    )


def _critical_path(outcome: BoundOutcome, batches: int) -> Table:
    timeline = outcome.timeline
    threads = timeline.graph.machine.threads
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
        in_ms = (f"{time / 1000 / batches:.3f}" for time in times)
        rows.append([name, *in_ms, f"{cause.total / end:.1%}", f"rank {most_on[name]}"])
    columns = ("work", "sharing", "pause", "arrival", "together", "of all")
    return Table([Words("task"), *columns, Words("most on")], rows)


def as_json(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> dict[str, Any]:
    """Returns the same for machines, in microseconds and bytes; arguments are those of
    `as_text`."""
    link = simulation.ranks.link
    return {
        "format": FORMAT,
        "ranks": job.ranks,
        "backend": job.backend,
        "training": job.training,
        "delays": simulation.delays.text,
        "batches": simulation.batches,
        "seed": simulation.seed,
        "link_gbit": _gbit(simulation),
        "link_burst_bytes": None if link is None else link.burst_bytes,
        "codecs": [asdict(codec) for codec in simulation.codecs],
        "chosen_bound": None if chosen is None else chosen.bound,
        "chosen_codec": None if chosen is None else chosen.codec,
        "notes": notes_on(job, simulation),
        "bounds": [
            {
                "bound": each.bound,
                "codec": each.codec,
                "step_us": each.step_us,
                "step_percentiles_us": dict(
                    zip(("50", "95", "99"), each.step_percentiles_us, strict=True)
                ),
                "latency_us": each.latency_us,
                "memory_bytes": each.memory_bytes,
                "embedding_bytes": each.embedding_bytes,
            }
            for each in outcomes
        ],
    }
