"""Runs the verbs suite, in a guest with Soft-RoCE devices unless a device is named:
`make test-verbs`, `make test-verbs DEVICE=mlx5_0`."""

import argparse
import compileall
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.paths import ROOT
from tests.verbs import suite
from tests.verbs.guest.boot import run_in_guest

_GUEST_DEVICES = ("rxe0", "rxe1")
_GUEST_SECONDS = 3600
_DEVICES = Path("/sys/class/infiniband")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every step passed, or where there is nothing to run them on."""
    parser = argparse.ArgumentParser(prog="python -m tests.verbs", description=__doc__)
    parser.add_argument("--device", help="of this machine; default: the guest's")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "verbs", help="logs go there")
    parser.add_argument("--short", action="store_true", help="without what needs torch")
    options = parser.parse_args(arguments)
    short = ["--short"] if options.short else []
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    device = options.device
    if device is None and shutil.which("qemu-system-x86_64") is None:
        device = next((path.name for path in sorted(_DEVICES.glob("*"))), None)
        if device is None:
            print("Skipped: this machine has no RDMA device and no qemu for a guest that has one.")
            # There a test that is left out would not be missed.
            return 1 if os.environ.get("CI") else 0
    if device is not None:
        print(f"On this machine's {device}; the output is in {out}", flush=True)
        return suite.main([device, "--out", str(out), *short])
    print(f"In a guest with {' and '.join(_GUEST_DEVICES)}; the output is in {out}", flush=True)
    # The guest could not keep what it compiles.
    for package in ("tests", "torchrec_bls"):
        compileall.compile_dir(ROOT / package, quiet=2)
    command = [sys.executable, "-m", "tests.verbs.suite", *_GUEST_DEVICES, "--out", str(out)]
    return run_in_guest(
        f"cd {shlex.quote(str(ROOT))} && {shlex.join(command + short)}", out, _GUEST_SECONDS
    )


if __name__ == "__main__":
    sys.exit(main())
