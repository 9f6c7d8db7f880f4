"""The options for the model and the ranks of a plan or a simulation."""

import argparse
from pathlib import Path


def add_job_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the options to a sub-command's parser; `check_job_options` finds missing ones."""
    add = parser.add_argument
    add("--model", type=Path, required=required, metavar="FILE", help="the tables, JSON")
    add(
        "--profile",
        required=required,
        help="file of `torchrec-bls calibrate`, or a shipped one's name: epyc-milan-2-cores",
    )
    add("--ranks", type=int, required=required, help="world size")
    add("--ranks-per-host", type=int, help="ranks that share a host (default: all)")
    add("--cores-per-host", type=int, help="cores that they share (default: one each)")
    add("--batch", type=int, default=512, help="samples per rank and step (default: %(default)s)")
    add("--backend", default="bls", choices=("bls", "gloo"), help="(default: %(default)s)")


def check_job_options(options: argparse.Namespace) -> None:
    """Checks that the options without a default are given.

    Raises:
        ValueError: such an option is missing.
    """
    missing = [name for name in ("model", "profile", "ranks") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"--{missing[0]} is missing: say which job, or give --trace")
