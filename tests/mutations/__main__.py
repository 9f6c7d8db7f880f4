"""Mutates files of all kinds: python -m tests.mutations [--times 10000] [--seed 0].

Ends with an error at the first file whose reader raises something else than it promises, or if the
process took more than 1 GiB.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

from tests.mutations.check import check
from tests.mutations.files import KINDS

_MOST_MIB = 1024


def main() -> None:
    """Prints how many files of each kind were accepted and refused, and the most memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10_000, help="how many, of all kinds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one of each kind")
    parser.add_argument("--kind", choices=KINDS, help="one kind alone")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else list(KINDS)
    print(f"{_most_mib()} MiB before")
    for name in kinds:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            counts = check(name, -(-arguments.times // len(kinds)), arguments.seed, Path(folder))
        seconds = time.monotonic() - started
        print(f"{name}: {dict(counts)}, {seconds:.0f} s, {_most_mib()} MiB", flush=True)
    assert _most_mib() <= _MOST_MIB, "more memory than 1 GiB"


def _most_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
