"""`torchrec-bls simulate --trace`: replays a recorded job, by other bounds and delays."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

_US_PER_MS = 1000.0
# Options that a recording already decides, with their defaults.
_OF_PLANNED_JOBS = {
    **dict.fromkeys(("model", "ranks", "ranks_per_host", "cores_per_host")),
    **dict.fromkeys(("plan", "max_memory_gib", "link")),
    "training": False,
    "codec": "fp32",
    "dense_ms": 0.0,
}


def simulate_trace(options: argparse.Namespace, bounds: Sequence[int]) -> None:
    """Replays what `record_step` wrote into a folder, and prints a line for each bound.

    Args:
        options: `trace`, `profile`, `delays`, `batches`, `seed`, `choose`, `max_latency_ms`,
            `json`, `html` and `perfetto` of the sub-command.
        bounds: bounds to replay.

    Raises:
        ValueError: an option is only for planned jobs, the traces are not those of all ranks of a
            job, the job can't have a bound or needs no profile, or no bound is within the limit.
        OSError: a file can't be read or written.
    """
    from torchrec_bls.observe.traces.merged_trace import merged_trace
    from torchrec_bls.observe.traces.read_job import read_job, traces_in
    from torchrec_bls.rendering.document import as_html, as_text
    from torchrec_bls.rendering.trace import write_trace
    from torchrec_bls.sharding.simulation.delays import read_delays
    from torchrec_bls.sharding.simulation.recorded.replay import replay
    from torchrec_bls.sharding.simulation.report.perfetto import trace_events
    from torchrec_bls.sharding.simulation.report.side_by_side import side_by_side

    _refuse_others(options)
    job = read_job(traces_in(options.trace))
    recording = recording_over(options.profile, job.recording)
    delays = read_delays(options.delays).sample(len(job.traces), options.batches, options.seed)
    replays = [replay(recording, bound, delays) for bound in bounds]
    chosen = _chosen(options, replays)
    report = {
        "format": 1,
        "ranks": len(job.traces),
        "recorded_steps": job.recording.steps,
        "recorded_step_us": job.step_us,
        "training": job.recording.trains,
        "channels_of": options.profile,
        "delays": options.delays,
        "batches": options.batches,
        "seed": options.seed,
        "bounds": [
            {
                "bound": each.bound,
                "step_us": each.step_us,
                "step_percentiles_us": dict(
                    zip(("50", "95", "99"), each.step_percentiles_us, strict=True)
                ),
                "latency_us": each.latency_us,
            }
            for each in replays
        ],
        "chosen": None if chosen is None else chosen.bound,
    }
    parts = _parts(report)
    print(as_text(parts))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.html is not None:
        options.html.write_text(as_html("Replayed steps", [*parts, _curves(replays)]))
    if options.perfetto is not None:
        shown = chosen or replays[-1]
        events = trace_events(shown.timeline, shown.timeline.graph.machine.threads)
        trace = side_by_side(events, merged_trace(job))
        write_trace(options.perfetto, trace)


def recording_over(profile: str | None, recording: Any) -> Any:
    """Returns a recording, with exchanges over the channels of a profile if there is one.

    Raises:
        ValueError: there is no such profile, or the recording needs none or does not fit one.
        OSError: the file can't be read.
    """
    if profile is None:
        return recording
    from torchrec_bls.sharding.costs.profile import load_profile
    from torchrec_bls.sharding.costs.profiled import ProfiledCosts
    from torchrec_bls.sharding.simulation.recorded.over_channels import over_channels

    return over_channels(recording, ProfiledCosts(load_profile(profile)))


def _refuse_others(options: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, default in _OF_PLANNED_JOBS.items()
        if getattr(options, name) != default
    ]
    if given:
        raise ValueError(
            f"--trace takes the job from the recording and so cannot be used with"
            f" {', '.join(given)}: leave that out"
        )


def _chosen(options: argparse.Namespace, replays: Sequence[Any]) -> Any:
    """Returns the replay to take, None unless --choose asks for it."""
    from torchrec_bls.sharding.simulation.bounds import WORTH

    limit_ms = options.max_latency_ms
    if options.choose is None and limit_ms is None:
        return None
    if options.choose != "bound":
        raise ValueError("--trace leaves nothing to choose but the bound: give --choose bound")
    if limit_ms is not None and not limit_ms > 0:
        raise ValueError(f"the limit of latency is {limit_ms} ms, but must be a positive number")
    within = [
        each for each in replays if limit_ms is None or each.latency_us <= limit_ms * _US_PER_MS
    ]
    if not within:
        least = min(each.latency_us for each in replays) / _US_PER_MS
        raise ValueError(f"no bound has batches of {limit_ms} ms: the least is {least:.3g} ms")
    fastest = min(each.step_us for each in within)
    near = [each for each in within if each.step_us <= WORTH * fastest]
    return min(near, key=lambda each: each.bound)


def _parts(report: dict[str, Any]) -> list[Any]:
    """Returns the parts of a report for people."""
    from torchrec_bls.rendering.document import Table, Words
    from torchrec_bls.sharding.simulation.report.outcomes import TAKEN

    first = report["bounds"][0]["step_us"]
    bounds = [each["bound"] for each in report["bounds"]]
    marked = None if report["chosen"] is None else bounds.index(report["chosen"])
    rows = []
    for row, each in enumerate(report["bounds"]):
        percentiles = [time / _US_PER_MS for time in each["step_percentiles_us"].values()]
        rows.append(
            [
                str(each["bound"]),
                f"{each['step_us'] / _US_PER_MS:.3f}",
                *(f"{time:.2f}" for time in percentiles),
                f"{first / each['step_us']:.2f}",
                f"{each['latency_us'] / _US_PER_MS:.2f}",
                TAKEN if row == marked else "",
            ]
        )
    columns = ("bound", "step ms", "p50", "p95", "p99", "times faster", "latency ms", Words())
    return [_setting(report), Table(columns, rows, marked=marked), _note(report)]


def _curves(replays: Sequence[Any]) -> Any:
    """Returns steps a second and latency by bound."""
    from torchrec_bls.rendering.chart import Curves, charts

    replays = sorted(replays, key=lambda each: each.bound)
    throughput = [(each.bound, _US_PER_MS * 1000 / each.step_us) for each in replays]
    latency = [(each.bound, each.latency_us / _US_PER_MS) for each in replays]
    return charts(
        Curves("bound", "steps a second", {"replayed": throughput}),
        Curves("bound", "latency of a batch, ms", {"replayed": latency}),
    )


def _setting(report: dict[str, Any]) -> str:
    kind = "training" if report["training"] else "inference"
    return (
        f"{report['ranks']} ranks, {kind}, {report['recorded_steps']} recorded steps of "
        f"{report['recorded_step_us'] / _US_PER_MS:.3f} ms, delays {report['delays']}, "
        f"{report['batches']} batches"
    )


def _note(report: dict[str, Any]) -> str:
    over = report["channels_of"]
    exchanges = "" if over is None else f" Exchanges are over channels, by profile {over}."
    return (
        "Simulated: what was recorded, with a core for each thread, and the delays beside."
        + exchanges
    )
