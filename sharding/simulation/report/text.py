"""A simulation of several bounds and codecs, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...problem.job import Job
from ..bounds import BoundOutcome, Simulation
from ..wire.codecs import FP32
from ..wire.link import Link

FORMAT = 1
#: What a simulated step holds.
SCOPE = "lookups and exchanges, and of the rest what the options give"
WHOLE = "whole steps with host costs of the profile; of dense layers what the options give"
_VALIDATED_RANKS = 8
_GIB = 2**30
_GBIT_PER_BYTE_A_US = 8e-3
#: Of the table of outcomes.
COLUMNS = (
    *("bound", "codec", "step ms", "p50", "p95", "p99", "times faster"),
    *("latency ms", "GiB a rank", "MB of embeddings"),
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
    """Returns a line for each bound and codec.

    Args:
        outcomes: outcomes by bound and codec.
        chosen: the outcome to take, if one was asked for.
        job: job that was simulated.
        simulation: settings of the simulation.
    """
    rows = cells_of(outcomes)
    widths = [max(len(cell) for cell in column) + 2 for column in zip(COLUMNS, *rows, strict=True)]
    lines = [
        "".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (COLUMNS, *rows)
    ]
    for number, each in enumerate(outcomes, start=1):
        lines[number] += "   <- take this" if each is chosen else ""
    notes = notes_on(job, simulation)
    return "\n".join([setting(job, simulation), "", *lines, "", *notes])


def cells_of(outcomes: Sequence[BoundOutcome]) -> list[list[str]]:
    """Returns a row of COLUMNS for each outcome; "times faster" compares with the first one's
    step."""
    return [
        [
            str(each.bound),
            each.codec,
            f"{each.step_us / 1000:.3f}",
            *(f"{time / 1000:.2f}" for time in each.step_percentiles_us),
            f"{outcomes[0].step_us / each.step_us:.2f}",
            f"{each.latency_us / 1000:.2f}",
            f"{each.memory_bytes / _GIB:.3f}",
            f"{each.embedding_bytes / 1e6:.2f}",
        ]
        for each in outcomes
    ]


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
