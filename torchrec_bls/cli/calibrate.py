"""`torchrec-bls calibrate`: measures this machine for the planner."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torchrec_bls._versions import VersionError, check_packages
from torchrec_bls.cli import calibrate_overlap
from torchrec_bls.cli.help import examples

OPTIMIZERS = ("exact_sgd", "exact_row_wise_adagrad")
_MINUTES, _MINUTES_OF_OVERLAP = 9.0, 5.0
# Options whose values an existing profile already has when an overlap is added to it.
_NOT_OF_OVERLAP = ("name", "memory_gib", "optimizer")


def add_command(commands: Any) -> None:
    """Adds the sub-command and its options."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine for the planner",
        description="Measures FBGEMM's lookups, the memory, and the all-to-alls and all-reduces of"
        " gloo and bls on this machine. Writes a profile that plans are made from. Let nothing"
        " else run meanwhile. A stopped calibration goes on where it stopped: its measurements"
        " are in a .measurements.jsonl file beside the profile.",
        epilog=examples(
            "calibrate --out profile.json",
            "calibrate --out profile.json --world-sizes 4 8 --minutes 20",
            "calibrate --out profile.json --overlap",
        ),
    )
    parser.add_argument("--out", type=Path, required=True, help="the profile, a .json file")
    parser.add_argument("--name", help="name of the machine, for people (default: its processor)")
    parser.add_argument(
        "--minutes",
        type=float,
        help="minutes to measure, over all starts"
        f" (default: {_MINUTES:g}, of an overlap {_MINUTES_OF_OVERLAP:g})",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=1.0,
        help="memory that tables and messages may take (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="optimizer that the backward includes (default: %(default)s)",
    )
    parser.add_argument(
        "--world-sizes",
        type=int,
        nargs="+",
        metavar="RANKS",
        help="numbers of ranks to measure collectives among (default: 2 4)",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="measure only how all-reduces of gradients and the backward slow each other down, and"
        " add it to a profile; under torchrun --no-python it is measured among torchrun's"
        " ranks, on any hosts",
    )
    parser.set_defaults(command=_calibrate, defaults=parser.get_default)


def _calibrate(options: argparse.Namespace) -> int:
    # Before any import that starts threads: everything is measured on one.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        check_packages()
    except VersionError as error:
        print(f"torchrec-bls calibrate: {error}", file=sys.stderr)
        return 1
    if options.overlap:
        given = [name for name in _NOT_OF_OVERLAP if options.defaults(name) != vars(options)[name]]
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            print(
                f"torchrec-bls calibrate: --overlap adds to the profile {options.out}, where"
                f" {named} can't be changed: leave it out",
                file=sys.stderr,
            )
            return 1
        minutes = _MINUTES_OF_OVERLAP if options.minutes is None else options.minutes
        return calibrate_overlap.run(options.out, minutes, options.world_sizes)
    from torchrec_bls.processes import RanksFailedError
    from torchrec_bls.sharding.calibration.run import Settings, calibrate
    from torchrec_bls.sharding.costs.machine import this_machine
    from torchrec_bls.sharding.costs.profile import ProfileError

    machine = this_machine()
    name = options.name or f"{machine.cpu}, {machine.cores} cores"
    try:
        settings = Settings(
            minutes=_MINUTES if options.minutes is None else options.minutes,
            memory_bytes=int(options.memory_gib * 2**30),
            optimizer=options.optimizer,
            world_sizes=tuple(options.world_sizes or (2, 4)),
        )
        profile = calibrate(options.out, name, settings)
    except (ProfileError, RanksFailedError, ValueError) as error:
        print(f"torchrec-bls calibrate: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {profile.name}")
    print(f"  time of a lookup: the {profile.lookup_time} of its repeats")
    for what, percent in profile.retest_percent.items():
        print(f"  {what}: two measurements differ by {percent:.1f} % (geometric mean)")
    return 0
