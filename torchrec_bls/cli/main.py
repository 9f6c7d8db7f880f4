"""The sub-commands of `torchrec-bls` and their options.

Modules imported here must not need torch: the command also runs where torch can't be imported.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from torchrec_bls.cli import analyse_tables, calibrate, plan, serve, simulate, trace
from torchrec_bls.cli.help import SubParser, examples
from torchrec_bls.doctor import report
from torchrec_bls.doctor.examination import examine


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns the exit status."""
    parser = make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    status: int = options.command(options)
    return status


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all sub-commands; `command` of its options runs one of them."""
    parser = argparse.ArgumentParser(prog="torchrec-bls", description="Tools of torchrec-bls.")
    parser.add_argument("--version", action="version", version=version("torchrec-bls"))
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=SubParser
    )
    doctor = commands.add_parser(
        "doctor",
        help="say what this host has for the channel, and whether the defaults will work",
        description="Says what this host has for the channel, tries each transport between two "
        "processes, and names a cure for each fault. Exit status 0: the defaults will work among "
        "the ranks of this host. RDMA and TCP, which only several hosts need, cause at most a "
        "warning.",
        epilog=examples("doctor", "doctor --json > host.json"),
    )
    doctor.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    doctor.set_defaults(command=_doctor)
    calibrate.add_command(commands)
    plan.add_command(commands)
    serve.add_command(commands)
    simulate.add_command(commands)
    trace.add_command(commands)
    analyse_tables.add_command(commands)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    findings = examine()
    if options.json:
        json.dump(report.as_json(findings), sys.stdout, indent=2)
        print()
    else:
        print(report.as_text(findings))
    return 0 if report.defaults_will_work(findings) else 1
