"""Starts the command `torchrec-bls`, also where `import torchrec_bls` raises.

Installed beside the package, as the module `torchrec_bls_command`: whatever lies inside can be
imported only after the package's own `__init__`, which refuses packages that don't fit together. To
say so is what `torchrec-bls doctor` is for.
"""

import importlib.util
import sys


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    specification = importlib.util.find_spec("torchrec_bls")
    if specification is None:
        print("torchrec-bls: the package torchrec_bls is not there any more", file=sys.stderr)
        return 1
    # The package without what its __init__ does: its modules can be imported one by one.
    sys.modules["torchrec_bls"] = importlib.util.module_from_spec(specification)
    from torchrec_bls.cli.main import run

    return run(sys.argv[1:])
