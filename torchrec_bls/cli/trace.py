"""The sub-command `torchrec-bls trace`: the profiler's traces of all ranks, joined."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_BOUNDS = (1, 2, 4, 8)
_US_PER_MS = 1000.0


def add_command(commands: Any) -> None:
    """Adds the sub-command to a parser's."""
    parser = commands.add_parser(
        "trace",
        help="join the profiler's traces of all ranks: who waited for whom",
        description="Joins what torch.profiler's export_chrome_trace wrote on each rank of a job "
        "with bounded-lag modules: finds out how far the clocks are apart, says who waited for "
        "whom and, of inference at bound 0, what a bound would save. Exit status 1: the traces "
        "are not those of all ranks of a job.",
    )
    add = parser.add_argument
    add("traces", type=Path, nargs="+", metavar="FILE", help="a trace of each rank, in their order")
    add("--json", type=Path, metavar="FILE", help="write the figures for machines")
    add("--perfetto", type=Path, metavar="FILE", help="write one trace of all ranks")
    parser.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    # Not before they are needed: the other commands start without them.
    from torchrec_bls.observe.lateness import lateness_of
    from torchrec_bls.observe.merged_trace import merged_trace
    from torchrec_bls.observe.traces import join, read_trace

    try:
        joined = join([read_trace(path, rank) for rank, path in enumerate(options.traces)])
        lateness = lateness_of(joined)
        saved = _steps_by_bound(joined)
        report = {
            "ranks": len(joined.traces),
            "steps": joined.start.shape[2],
            "bound": joined.bound,
            "step_us": lateness.step_us,
            "clock_offsets_us": joined.offsets.tolist(),
            "waited_us": lateness.waited_us.tolist(),
            "waited_for_most": lateness.last,
            "step_us_by_bound": saved,
        }
        print(_as_text(report))
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        if options.perfetto is not None:
            options.perfetto.write_text(json.dumps(merged_trace(joined)))
    except (ValueError, OSError) as error:
        print(f"torchrec-bls trace: {error}", file=sys.stderr)
        return 1
    return 0


def _steps_by_bound(joined: Any) -> dict[str, float]:
    """Returns the mean step at bounds that were not traced; nothing if that can't be said."""
    from torchrec_bls.sharding.simulation.measured import program_of_trace
    from torchrec_bls.sharding.simulation.program import Ranks, graph_of
    from torchrec_bls.sharding.simulation.timeline import simulate

    trains = any("gradients" in channel for channel, _ in joined.calls)
    if joined.bound > 0 or trains:
        return {}
    _, ranks, steps = joined.start.shape
    posts = {
        channel: joined.end[i].max(axis=0)
        for i, (channel, action) in enumerate(joined.calls)
        if action == "post"
    }
    sent = [posts[channel] for channel, _ in joined.calls]
    found = {}
    for bound in (0, *_BOUNDS):
        stages = program_of_trace(joined.calls, joined.start, joined.end, sent, bound)
        graph = graph_of(stages, Ranks.on_hosts(ranks, ranks, ranks), steps)
        found[str(bound)] = float(simulate(graph).end.max()) / steps
    return found


def _as_text(report: dict[str, Any]) -> str:
    ranks = range(report["ranks"])
    lines = [
        f"{report['ranks']} ranks, {report['steps']} steps at bound {report['bound']}, "
        f"{report['step_us'] / _US_PER_MS:.3f} ms each",
        "clocks ahead of rank 0's, ms: "
        + ", ".join(f"{each / _US_PER_MS:.3f}" for each in report["clock_offsets_us"]),
        "",
        "ms a step that a rank (line) waited for another one (column):",
        "      " + "".join(f"{rank:>9}" for rank in ranks),
    ]
    for rank in ranks:
        times = "".join(f"{each / _US_PER_MS:>9.3f}" for each in report["waited_us"][rank])
        lines.append(f"{rank:>6}{times}")
    lines += ["", f"Others waited for rank {report['waited_for_most']} most."]
    by_bound = report["step_us_by_bound"]
    if by_bound:
        lines += ["", "What a bound would make of these steps, if delays come as they did:"]
        for bound in map(str, _BOUNDS):
            times = by_bound["0"] / by_bound[bound]
            lines.append(
                f"bound {bound}: {by_bound[bound] / _US_PER_MS:.3f} ms, {times:.2f} times as fast"
            )
    return "\n".join(lines)
