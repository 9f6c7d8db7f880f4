"""A simulation of several bounds, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..problem.job import Job
from .bounds import BoundOutcome, Simulation

FORMAT = 1
#: What a simulated step holds.
SCOPE = "lookups and exchanges, and of the rest what the options give"
_VALIDATED_RANKS = 8
_GIB = 2**30


def notes_on(job: Job) -> list[str]:
    """Returns what people have to know of the figures."""
    notes = [f"Simulated: {SCOPE}."]
    if job.ranks > _VALIDATED_RANKS:
        notes.append(f"{job.ranks} ranks: extrapolated, not validated.")
    return notes


def as_text(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> str:
    """Returns a line for each bound.

    Args:
        outcomes: by bound.
        chosen: the one to take, if one was asked for.
        job: that was simulated.
        simulation: likewise.
    """
    kind = "training" if job.training else "inference"
    first = outcomes[0].step_us
    lines = [
        f"{job.ranks} ranks on {len(simulation.ranks.cores)} pools of {simulation.ranks.cores[0]} "
        f"cores, {kind} over {job.backend}, delays {simulation.delays.text}, "
        f"{simulation.batches} batches",
        "",
        "bound    step ms    p50    p95    p99   times faster   latency ms   GiB a rank",
    ]
    for each in outcomes:
        p50, p95, p99 = (time / 1000 for time in each.step_percentiles_us)
        lines.append(
            f"{each.bound:>5} {each.step_us / 1000:>10.3f} {p50:>6.2f} {p95:>6.2f} {p99:>6.2f} "
            f"{first / each.step_us:>14.2f} {each.latency_us / 1000:>12.2f} "
            f"{each.memory_bytes / _GIB:>12.3f}{'   <- take this' if each is chosen else ''}"
        )
    return "\n".join([*lines, "", *notes_on(job)])


def as_json(
    outcomes: Sequence[BoundOutcome], chosen: BoundOutcome | None, job: Job, simulation: Simulation
) -> dict[str, Any]:
    """Returns the same for machines, microseconds and bytes; arguments as of `as_text`."""
    return {
        "format": FORMAT,
        "ranks": job.ranks,
        "backend": job.backend,
        "training": job.training,
        "delays": simulation.delays.text,
        "batches": simulation.batches,
        "seed": simulation.seed,
        "chosen_bound": None if chosen is None else chosen.bound,
        "notes": notes_on(job),
        "bounds": [
            {
                "bound": each.bound,
                "step_us": each.step_us,
                "step_percentiles_us": dict(
                    zip(("50", "95", "99"), each.step_percentiles_us, strict=True)
                ),
                "latency_us": each.latency_us,
                "memory_bytes": each.memory_bytes,
            }
            for each in outcomes
        ],
    }
