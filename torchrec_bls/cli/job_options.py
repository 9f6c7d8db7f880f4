"""The options that say which model and which ranks a plan or a simulation is of."""

import argparse
from pathlib import Path


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Adds them to a sub-command's parser."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FILE", help="the tables, JSON")
    add(
        "--profile", required=True, help="file of `torchrec-bls calibrate`, or a shipped one's name"
    )
    add("--ranks", type=int, required=True, help="world size")
    add("--ranks-per-host", type=int, help="ranks that share a host (default: all)")
    add("--cores-per-host", type=int, help="cores they share (default: one each)")
    add("--batch", type=int, default=512, help="samples per rank and step (default: %(default)s)")
    add("--backend", default="bls", choices=("bls", "gloo"), help="(default: %(default)s)")
