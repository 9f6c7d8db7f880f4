"""The torch, fbgemm and torchrec that are tested together. Their versions stand only here.

Run as a program, which needs only the standard library, the module prints what to install:
`python torchrec_bls/_trios.py [2.14]`. With `--torchrec` it prints what is installed with
`--no-deps`. `--names` prints the names of all trios, the oldest first.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Trio(NamedTuple):
    """Versions that fit together: fbgemm 1.X and torchrec 1.X go with torch 2.(X+5)."""

    torch: str
    fbgemm: str
    torchrec: str

    @property
    def name(self) -> str:
        """Major and minor version of torch, "2.13"."""
        return ".".join(self.torch.split(".")[:2])


# The oldest first.
TRIOS = (
    Trio("2.11.0", "1.6.0", "1.6.1"),
    Trio("2.12.1", "1.7.0", "1.7.0"),
    Trio("2.13.0", "1.8.0", "1.8.0"),
    Trio("2.14.1", "1.9.0", "1.9.2"),
)
# The trio that `make` builds with. It is also proposed if no installed package suggests another
# one.
DEFAULT = TRIOS[2]

# What torchrec requires besides torch and fbgemm. It is installed with --no-deps, since it requires
# the distribution fbgemm-gpu, the CUDA build, which writes the same files as fbgemm-gpu-cpu.
BESIDE_TORCHREC = ("tensordict>=0.10,<1", "torchmetrics==1.0.3", "pyre-extensions==0.0.32")


def trio_named(name: str) -> Trio:
    """Returns the trio of a minor version of torch.

    Raises:
        ValueError: there is no such trio.
    """
    for trio in TRIOS:
        if trio.name == name:
            return trio
    raise ValueError(f"there is no trio {name!r}, but {', '.join(trio.name for trio in TRIOS)}")


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prints the requirements of a trio for pip.")
    parser.add_argument("trio", nargs="?", default=DEFAULT.name, help="default: %(default)s")
    parser.add_argument("--torchrec", action="store_true", help="print what needs --no-deps")
    parser.add_argument("--names", action="store_true", help="print the names of all trios")
    options = parser.parse_args(arguments)
    if options.names:
        print(*(trio.name for trio in TRIOS))
        return
    try:
        trio = trio_named(options.trio)
    except ValueError as error:
        parser.error(str(error))
    if options.torchrec:
        print(f"torchrec=={trio.torchrec}")
    else:
        print(f"torch=={trio.torch}", f"fbgemm-gpu-cpu=={trio.fbgemm}", *BESIDE_TORCHREC, sep="\n")


if __name__ == "__main__":
    _main()
