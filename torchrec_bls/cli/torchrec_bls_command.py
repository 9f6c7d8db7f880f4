"""Starts the command `torchrec-bls`, also where `import torchrec_bls` raises.

The module is installed beside the package, as `torchrec_bls_command`. A module inside the package
can be imported only after the package's `__init__`, which refuses packages that don't fit together.
`torchrec-bls doctor` has to run with such packages, to report them.
"""

import importlib.util
import sys


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    specification = importlib.util.find_spec("torchrec_bls")
    if specification is None:
        print("torchrec-bls: the package torchrec_bls is not there any more", file=sys.stderr)
        return 1
    # Imports the package without running its __init__: then its modules can be imported one by one.
    sys.modules["torchrec_bls"] = importlib.util.module_from_spec(specification)
    from torchrec_bls.cli.main import run

    return run(sys.argv[1:])
