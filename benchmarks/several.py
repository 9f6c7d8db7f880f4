"""Runs several benchmarks in one process, so that torch and TorchRec are imported once.

Each argument is a benchmark with its options: python -m benchmarks.several "direct.reads --quick".
It shows that they run. Figures are better taken from a process that has done nothing else.
"""

import importlib
import shlex
import sys
import time


def main() -> None:
    commands = sys.argv[1:]
    for command in commands:
        name, *options = shlex.split(command)
        print(f"\n=== benchmarks.{command}", flush=True)
        started = time.monotonic()
        sys.argv = [name, *options]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"=== {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
