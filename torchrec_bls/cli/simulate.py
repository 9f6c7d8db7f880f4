"""The sub-command `torchrec-bls simulate`: simulated steps of a job, by bound and codec."""

import argparse
import json
import sys
from pathlib import Path
from statistics import median_low
from typing import Any

from torchrec_bls.cli.choices import check_choices, choices_of, chosen_of
from torchrec_bls.cli.help import examples
from torchrec_bls.cli.job_options import add_job_options, check_job_options
from torchrec_bls.cli.simulate_trace import simulate_trace

_US_PER_MS = 1000.0


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "simulate",
        help="simulate the steps of a job, and choose the bound of its lag and its codec",
        description="Simulates the steps of a model whose tables a JSON file describes, as for "
        "`plan`. Ranks share cores and are delayed now and then. Each bound of lag is simulated "
        "with each codec. Codecs are timed on this machine: let nothing else run. "
        "Exit status 1: no bound is within the limits, or a file is invalid or can't be written.",
        epilog=examples(
            "simulate --model tables.json --profile epyc-milan-2-cores --ranks 4 "
            "--delays uniform:0-10ms --choose bound",
            "simulate --model tables.json --profile profile.json --ranks 8 --ranks-per-host 4 "
            "--link 1gbit --codec fp32,uint8 --choose bound,codec --html page.html",
            "simulate --trace traces --delays spikes:5%,50ms",
        ),
    )
    add = parser.add_argument
    add_job_options(parser, required=False)
    add("--plan", type=Path, metavar="FILE", help="file of `plan --save` (default: plan anew)")
    add("--trace", type=Path, metavar="DIR", help="folder of record_step to replay, not --model")
    add("--training", action="store_true", help="with a backward; only at bound 0")
    add("--bound", default="0,1,2,4,8", help="bounds to simulate (default: %(default)s)")
    add(
        "--delays",
        default="none",
        help="how much longer ranks take in a step, e.g. uniform:0-10ms (anything between) or "
        "spikes:5%%,50ms (how often, how long); 'help' names all forms (default: %(default)s)",
    )
    add("--codec", default="fp32", help="codecs of embeddings, e.g. fp32,uint8,uint4")
    add("--link", metavar="RATE", help="each host's link, e.g. 1gbit, or '1gbit burst 256kb'")
    add("--dense-ms", type=float, default=0.0, help="time of the model's other layers (default: 0)")
    add("--batches", type=int, default=200, help="batches of each rank (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the delays (default: %(default)s)")
    add(
        "--choose",
        metavar="WHAT",
        help="choose the best plan, bound or codec, or several of them, with commas",
    )
    add("--max-memory-gib", type=float, metavar="G", help="most memory of a rank, for --choose")
    add("--max-latency-ms", type=float, metavar="L", help="latency limit of a batch, for --choose")
    add("--json", type=Path, metavar="FILE", help="write the figures for machines")
    add("--html", type=Path, metavar="FILE", help="write a page")
    add("--perfetto", type=Path, metavar="FILE", help="write a trace of the choice, or of the last")
    parser.set_defaults(command=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    # Imported late: the other commands start without them.
    from torchrec_bls.rendering.trace import write_trace
    from torchrec_bls.sharding.costs.profile import load_profile
    from torchrec_bls.sharding.costs.profiled import ProfiledCosts
    from torchrec_bls.sharding.problem.model_file import read_model
    from torchrec_bls.sharding.search.infeasible import InfeasiblePlanError
    from torchrec_bls.sharding.simulation.bounds import Simulation, simulate_bounds
    from torchrec_bls.sharding.simulation.data_parallel import DenseSteps
    from torchrec_bls.sharding.simulation.delays import read_delays
    from torchrec_bls.sharding.simulation.program import Ranks
    from torchrec_bls.sharding.simulation.report.outcomes import as_html, as_json, as_text
    from torchrec_bls.sharding.simulation.report.perfetto import trace_events
    from torchrec_bls.sharding.simulation.wire.link import read_link

    try:
        bounds = _bounds(options.bound)
        if options.trace is not None:
            simulate_trace(options, bounds)
            return 0
        check_job_options(options)
        choices = choices_of(options)
        costs = ProfiledCosts(load_profile(options.profile))
        workload = read_model(options.model)
        job = _job(options)
        per_host = job.host_ranks
        host = costs.host(job.backend, job.training, job.ranks, job.ranks_per_core)
        bytes_per_us, burst_bytes = (None, 0.0) if options.link is None else read_link(options.link)
        simulation = Simulation(
            Ranks.on_hosts(
                job.ranks,
                per_host,
                options.cores_per_host or per_host,
                link_bytes_per_us=bytes_per_us,
                link_burst_bytes=burst_bytes,
            ),
            read_delays(options.delays),
            options.batches,
            options.seed,
            host=None if host is None else host.costs,
            dense=DenseSteps(forward_us=options.dense_ms * _US_PER_MS),
            codecs=_codecs(options.codec, workload),
        )
        check_choices(choices, bounds, simulation.codecs)
        if "plan" in choices:
            plan, choice = _chosen_plan(workload, job, costs, host)
        else:
            plan, choice = _plan(options, workload, job, costs), None
        outcomes = simulate_bounds(plan, workload, job, costs, bounds, simulation)
        chosen = chosen_of(options, choices, outcomes)
        print(as_text(outcomes, chosen, job, simulation))
        if choice is not None:
            print(f"A step of the plan: {choice.text}.")
        if options.json is not None:
            report = as_json(outcomes, chosen, job, simulation)
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        if options.html is not None:
            options.html.write_text(as_html(outcomes, chosen, job, simulation))
        if options.perfetto is not None:
            timeline = (chosen or outcomes[-1]).timeline
            events = trace_events(timeline, timeline.graph.machine.threads)
            write_trace(options.perfetto, events)
    except (ValueError, OSError, ImportError, InfeasiblePlanError) as error:
        print(f"torchrec-bls simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _codecs(text: str, workload: Any) -> list[Any]:
    """Returns the costs of codecs, timed on rows of the tables' median width."""
    from torchrec_bls.sharding.simulation.wire.codecs import FP32

    names = [name.strip() for name in text.split(",")]
    if names == [FP32.name]:
        return [FP32]
    # Imports torch, which takes seconds.
    from torchrec_bls.sharding.calibration.codec_costs import measure_codecs

    return list(measure_codecs(names, median_low(table.dim for table in workload.tables)))


def _job(options: argparse.Namespace) -> Any:
    from torchrec_bls.sharding.problem.job import Job

    # The memory is no limit here: the plan is given, or it is one for ranks with unlimited memory.
    return Job(
        ranks=options.ranks,
        batch=options.batch,
        memory_bytes=[1 << 60] * max(options.ranks, 0),
        ranks_per_host=options.ranks_per_host,
        cores_per_host=options.cores_per_host,
        backend=options.backend,
        training=options.training,
    )


def _chosen_plan(workload: Any, job: Any, costs: Any, host: Any) -> tuple[Any, Any]:
    from torchrec_bls.sharding.costs.profile import ProfileError
    from torchrec_bls.sharding.problem.options import make_problem
    from torchrec_bls.sharding.search.search import search
    from torchrec_bls.sharding.simulation.choose_plan import choose_plan

    if host is None:
        raise ProfileError(
            f"--choose plan needs host costs of {'training' if job.training else 'inference'} over "
            f"{job.backend}, which the profile lacks: calibrate again"
        )
    found = search(make_problem(workload, job, costs))
    plans = [each.plan for each in (found, *found.others)]
    choice = choose_plan(plans, workload, job, costs, host)
    return plans[choice.chosen], choice


def _plan(options: argparse.Namespace, workload: Any, job: Any, costs: Any) -> Any:
    from torchrec_bls.sharding.problem.options import make_problem
    from torchrec_bls.sharding.problem.plan_file import read_plan
    from torchrec_bls.sharding.search.search import search

    if options.plan is None:
        return search(make_problem(workload, job, costs)).plan
    saved = read_plan(options.plan)
    saved.check_shape(job.ranks, job.host_ranks, str(options.plan))
    return saved.of(workload.tables, str(options.plan))


def _bounds(text: str) -> list[int]:
    try:
        bounds = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--bound is '{text}', but must be numbers separated by commas") from error
    return bounds
