"""The sub-command `torchrec-bls analyse-tables`: bounds and stages of a model's tables."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torchrec_bls.cli.help import examples

_BYTES_PER_GBIT = 1e9 / 8


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "analyse-tables",
        help="choose error bounds and stages of compression for a model's embedding tables",
        description="Analyses the lookups of a trained model in some batches, as "
        "torchrec_bls.record_lookups wrote them. Says which rounding the rows of each table bear, "
        "and which bound they get for that. Says which stages of compression are the fastest for a "
        "link. Times are measured on this machine: let nothing else run. Exit status 1: a file is "
        "invalid or can't be written.",
        epilog=examples(
            "analyse-tables --samples lookups --gbit 1 --out bounds.json",
            "analyse-tables --samples lookups --profile profile.json --ranks 4 --out bounds.json",
        ),
    )
    add = parser.add_argument
    add("--samples", type=Path, required=True, metavar="DIR", help="folder of record_lookups")
    link = parser.add_mutually_exclusive_group(required=True)
    link.add_argument(
        "--profile", help="file of `torchrec-bls calibrate`, or a shipped one's name: its link"
    )
    link.add_argument("--gbit", type=float, help="gigabits that one rank sends in a second")
    add("--ranks", type=int, help="world size, with --profile (default: the largest it has)")
    add(
        "--ranks-per-core",
        type=float,
        help="ranks that share a core (default: 1; with --profile, as many as in its measurement)",
    )
    add(
        "--bounds",
        type=float,
        nargs=3,
        default=(0.01, 0.03, 0.05),
        metavar=("SMALL", "MEDIUM", "LARGE"),
        help="error bounds of the classes (default: 0.01 0.03 0.05)",
    )
    add("--probe", type=float, default=0.01, help="bound of eta (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FILE", help="bounds.json for CodecConfig")
    add("--json", type=Path, metavar="FILE", help="write the report for machines")
    add("--html", type=Path, metavar="FILE", help="write the report as a page")
    parser.set_defaults(command=_analyse)


def _analyse(options: argparse.Namespace) -> int:
    # Imported late: the other commands start without them.
    from torchrec_bls.analysis.analysis import analyse
    from torchrec_bls.analysis.files import as_bounds, as_json
    from torchrec_bls.analysis.report import as_html, as_text
    from torchrec_bls.analysis.samples import Samples
    from torchrec_bls.analysis.table_classes import ClassBounds

    try:
        link, source, ranks_per_core = _link(options)
        small, medium, large = options.bounds
        bounds = ClassBounds(small, medium, large, options.probe)
        analysis = analyse(Samples(options.samples), link, source, bounds, ranks_per_core)
        print(as_text(analysis))
        options.out.write_text(json.dumps(as_bounds(analysis), indent=2) + "\n")
        if options.json is not None:
            options.json.write_text(json.dumps(as_json(analysis), indent=2) + "\n")
        if options.html is not None:
            options.html.write_text(as_html(analysis))
    except (ValueError, OSError) as error:
        print(f"torchrec-bls analyse-tables: {error}", file=sys.stderr)
        return 1
    return 0


def _link(options: argparse.Namespace) -> tuple[float, str, float]:
    """Returns bytes per second, their source, and the number of ranks that share a core."""
    given = options.ranks_per_core
    if given is not None and not 1 <= given < float("inf"):
        raise ValueError(f"--ranks-per-core is {given}, but must be a number of at least 1")
    if options.profile is None:
        if options.ranks is not None:
            raise ValueError("--ranks belongs to --profile: leave it out with --gbit")
        link = options.gbit * _BYTES_PER_GBIT
        if not 0 < link < float("inf"):
            raise ValueError(f"--gbit is {options.gbit}, but must be a positive number")
        return link, f"{options.gbit:g} Gbit/s{_shared(given or 1.0)}", given or 1.0
    from torchrec_bls.sharding.costs.profile import load_profile

    profile = load_profile(options.profile)
    ranks = max(profile.calibrated_ranks()) if options.ranks is None else options.ranks
    sharing = max(1.0, ranks / profile.machine.cores) if given is None else given
    source = f"profile {profile.name}, {ranks} ranks{_shared(sharing)}"
    return profile.link(ranks), source, sharing


def _shared(ranks_per_core: float) -> str:
    return f", {ranks_per_core:g} on a core" if ranks_per_core > 1 else ""
