"""The sub-command `torchrec-bls trace`: the profiler's traces of all ranks, joined."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_bls.cli.help import examples

_BOUNDS = (1, 2, 4, 8)
_US_PER_MS = 1000.0


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "trace",
        help="join the profiler's traces of all ranks: who waited for whom",
        description="Joins the traces of all ranks of a job: one with bounded-lag modules, or any "
        "over gloo. record_step wrote them, or for bounded-lag modules torch.profiler's "
        "export_chrome_trace. Finds out how far the clocks are apart, and says who waited for "
        "whom. For inference at bound 0 it also says what a bound would save. Exit status 1: the "
        "traces are not those of all ranks of a job.",
        epilog=examples(
            "trace traces --perfetto all.json",
            "trace traces --profile profile.json",
            "trace rank0.json rank1.json",
        ),
    )
    add = parser.add_argument
    add(
        "traces",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="traces of all ranks, in their order, or the folder of record_step",
    )
    add("--profile", help="file of `calibrate`: bounds for a job over gloo that goes to channels")
    add("--json", type=Path, metavar="FILE", help="write the figures for machines")
    add("--perfetto", type=Path, metavar="FILE", help="write one trace of all ranks")
    parser.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    # Imported late: the other commands start without them.
    from torchrec_bls.cli.simulate_trace import recording_over
    from torchrec_bls.observe.traces.lateness import lateness_of
    from torchrec_bls.observe.traces.merged_trace import merged_trace
    from torchrec_bls.observe.traces.read_job import read_job
    from torchrec_bls.rendering.document import as_text
    from torchrec_bls.rendering.trace import write_trace

    try:
        job = read_job([path for given in options.traces for path in _traces_at(given)])
        by_bound = _steps_by_bound(recording_over(options.profile, job.recording))
        if options.profile is not None and not by_bound:
            raise ValueError(
                f"--profile {options.profile} says what a bound would save, but this job has none "
                "that could be computed: it trains, or steps wait for what earlier ones began. "
                "Leave --profile out"
            )
        lateness = lateness_of(job)
        report = {
            "ranks": len(job.traces),
            "steps": job.recording.steps,
            "bound": job.recording.bound,
            "step_us": job.step_us,
            "clock_offsets_us": job.offsets.tolist(),
            "waited_us": lateness.waited_us.tolist(),
            "slowest": lateness.slowest,
            "verdict": _verdict(lateness.waited_least),
            "step_us_by_bound": by_bound,
            "over_process_groups": job.recording.has_workers,
            "channels_of": options.profile,
        }
        print(as_text(_parts(report)))
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        if options.perfetto is not None:
            write_trace(options.perfetto, merged_trace(job))
    except (ValueError, OSError) as error:
        print(f"torchrec-bls trace: {error}", file=sys.stderr)
        return 1
    return 0


def _verdict(least: Any) -> str:
    return "No rank waited for another" if least is None else str(least).capitalize()


def _traces_at(path: Path) -> list[Path]:
    from torchrec_bls.observe.traces.read_job import traces_in

    return traces_in(path) if path.is_dir() else [path]


def _steps_by_bound(recording: Any) -> dict[str, float]:
    """Returns the mean step at bounds that were not traced; empty if that can't be computed."""
    import numpy as np

    from torchrec_bls.sharding.simulation.recorded.replay import replay

    if recording.bound > 0 or recording.trains or recording.begins_early:
        return {}
    delays = np.zeros((len(recording.ranks), recording.steps))
    return {str(bound): replay(recording, bound, delays).step_us for bound in (0, *_BOUNDS)}


def _parts(report: dict[str, Any]) -> Iterator[Any]:
    """Yields the parts of a report for people."""
    from torchrec_bls.rendering.document import Table

    ranks = range(report["ranks"])
    ahead = ", ".join(f"{each / _US_PER_MS:.3f}" for each in report["clock_offsets_us"])
    yield (
        f"{report['ranks']} ranks, {report['steps']} steps at bound {report['bound']}, "
        f"{report['step_us'] / _US_PER_MS:.3f} ms each"
    )
    yield f"clocks ahead of rank 0's, ms: {ahead}"
    yield "ms a step that a rank (line) waited for another one (column):"
    waited = report["waited_us"]
    rows = [[str(r), *(f"{each / _US_PER_MS:.3f}" for each in waited[r])] for r in ranks]
    yield Table(["", *map(str, ranks)], rows)
    yield f"{report['verdict']}."
    by_bound = report["step_us_by_bound"]
    if not by_bound:
        return
    yield "What a bound would make of these steps, if delays come as they did:"
    steps = {bound: by_bound[str(bound)] for bound in _BOUNDS}
    rows = [
        [
            f"bound {bound}:",
            f"{step / _US_PER_MS:.3f} ms,",
            f"{by_bound['0'] / step:.2f} times as fast",
        ]
        for bound, step in steps.items()
    ]
    yield Table(["", "", ""], rows)
    if report["channels_of"] is not None:
        yield (
            f"Over bounded-lag channels, by profile {report['channels_of']}: bound 0 takes "
            f"{by_bound['0'] / _US_PER_MS:.3f} ms."
        )
    elif report["over_process_groups"]:
        yield (
            "Exchanges are taken to last as long as the recorded ones. Those of bounded-lag "
            "channels are shorter: a larger part of their steps is delay, and saved. Give "
            "--profile for these."
        )
