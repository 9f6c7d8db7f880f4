"""The sub-command `torchrec-bls plan`: a sharding plan of a described model, and its report."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torchrec_bls._deprecated import GONE_IN
from torchrec_bls.cli.help import examples
from torchrec_bls.cli.job_options import add_job_options
from torchrec_bls.records import AboveZero, Format

_GIB = 1 << 30
_MEASURED = Format(dict[str, AboveZero], 'give microseconds by phase, as {"step": 1234}')


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "plan",
        help="plan the sharding of a model's embedding tables and report why",
        description="Plans the sharding of the tables that a JSON file describes "
        '({"tables": [{"name": "t", "rows": 1000, "dim": 64, "pooling_factor": 2.5, "unique_rows": '
        '{"64": 140, "4096": 910}}, ...]}; unique_rows: distinct rows that so many samples read) '
        "for a machine with a calibrated profile, and prints prediction, ranks and decisions. Exit "
        "status 1: no plan fits, or a file is invalid or can't be written.",
        epilog=examples(
            "plan --model tables.json --profile epyc-milan-2-cores --ranks 8 --inference",
            "plan --model tables.json --profile profile.json --ranks 8 --save plan.json",
        ),
    )
    add = parser.add_argument
    add_job_options(parser)
    add("--memory-gib", type=float, default=16.0, help="memory of each rank (default: %(default)s)")
    add("--bound", type=int, default=0, help="iterations that ranks may be apart")
    add("--inference", action="store_true", help="plan without a backward; a bound implies it")
    add("--measured", type=Path, metavar="FILE", help='measured microseconds: {"step": 1234}, JSON')
    add("--save", type=Path, metavar="FILE", help="write the plan, for sharding.load_plan")
    add("--json", type=Path, metavar="FILE", help="write the report for machines")
    add("--html", type=Path, metavar="FILE", help="write the report as a page")
    add("--png", type=Path, metavar="FILE", help=f"goes in {GONE_IN}: take --html")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    # Imported late: the other commands start without them.
    from torchrec_bls.sharding.costs.profile import load_profile
    from torchrec_bls.sharding.costs.profiled import ProfiledCosts
    from torchrec_bls.sharding.problem.job import Job
    from torchrec_bls.sharding.problem.model_file import read_model
    from torchrec_bls.sharding.problem.options import make_problem
    from torchrec_bls.sharding.problem.plan_file import save_plan
    from torchrec_bls.sharding.report.figure import save_figure
    from torchrec_bls.sharding.report.plan_report import make_report
    from torchrec_bls.sharding.search.infeasible import InfeasiblePlanError
    from torchrec_bls.sharding.search.search import search

    try:
        workload = read_model(options.model)
        job = Job(
            ranks=options.ranks,
            batch=options.batch,
            memory_bytes=[int(options.memory_gib * _GIB)] * options.ranks,
            ranks_per_host=options.ranks_per_host,
            cores_per_host=options.cores_per_host,
            backend=options.backend,
            bound=options.bound,
            training=not options.inference and options.bound == 0,
        )
        costs = ProfiledCosts(load_profile(options.profile))
        found = search(make_problem(workload, job, costs))
        report = make_report(workload, found, costs)
        if options.measured is not None:
            report = report.with_measurement(_MEASURED.read(options.measured))
        print(report.as_text())
        if options.save is not None:
            save_plan(options.save, found.plan, job.ranks, job.host_ranks)
        if options.json is not None:
            options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        if options.html is not None:
            options.html.write_text(report.as_html())
        if options.png is not None:
            print(f"torchrec-bls plan: --png goes in {GONE_IN}: take --html", file=sys.stderr)
            save_figure(report, options.png)
    except (ValueError, OSError, ImportError, InfeasiblePlanError) as error:
        print(f"torchrec-bls plan: {error}", file=sys.stderr)
        return 1
    return 0
