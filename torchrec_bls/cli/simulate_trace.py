"""`torchrec-bls simulate --trace`: a recorded job again, by bound, held up otherwise."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

_US_PER_MS = 1000.0


def simulate_trace(options: argparse.Namespace, bounds: Sequence[int]) -> None:
    """Replays what `record_step` wrote into a folder, and prints a line for each bound.

    Args:
        options: `trace`, `delays`, `batches`, `seed`, `json` and `perfetto` of the sub-command.
        bounds: to replay.

    Raises:
        ValueError: the traces are not those of all ranks of a job, or the job can't have a bound.
        OSError: a file can't be read or written.
    """
    from torchrec_bls.observe.traces.merged_trace import merged_trace
    from torchrec_bls.observe.traces.read_job import read_job, traces_in
    from torchrec_bls.sharding.simulation.delays import read_delays
    from torchrec_bls.sharding.simulation.recorded.replay import replay
    from torchrec_bls.sharding.simulation.report.perfetto import trace_events
    from torchrec_bls.sharding.simulation.report.side_by_side import side_by_side

    if options.plan is not None or options.training or options.choose:
        raise ValueError(
            "--trace says what the job is: --plan, --training and --choose are for one that is "
            "planned"
        )
    job = read_job(traces_in(options.trace))
    delays = read_delays(options.delays).sample(len(job.traces), options.batches, options.seed)
    replays = [replay(job.recording, bound, delays) for bound in bounds]
    report = {
        "format": 1,
        "ranks": len(job.traces),
        "recorded_steps": job.recording.steps,
        "recorded_step_us": job.step_us,
        "training": job.recording.trains,
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
    }
    print(_as_text(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.perfetto is not None:
        last = replays[-1]
        trace = side_by_side(trace_events(last.timeline, last.threads), merged_trace(job))
        options.perfetto.write_text(json.dumps(trace))


def _as_text(report: dict[str, Any]) -> str:
    first = report["bounds"][0]["step_us"]
    kind = "training" if report["training"] else "inference"
    lines = [
        f"{report['ranks']} ranks, {kind}, {report['recorded_steps']} recorded steps of "
        f"{report['recorded_step_us'] / _US_PER_MS:.3f} ms, delays {report['delays']}, "
        f"{report['batches']} batches",
        "",
        "bound    step ms    p50    p95    p99   times faster   latency ms",
    ]
    for each in report["bounds"]:
        p50, p95, p99 = (time / _US_PER_MS for time in each["step_percentiles_us"].values())
        lines.append(
            f"{each['bound']:>5} {each['step_us'] / _US_PER_MS:>10.3f} {p50:>6.2f} {p95:>6.2f} "
            f"{p99:>6.2f} {first / each['step_us']:>14.2f} {each['latency_us'] / _US_PER_MS:>12.2f}"
        )
    lines += [
        "",
        "Simulated: what was recorded, with a core for each thread, and the delays beside.",
    ]
    return "\n".join(lines)
