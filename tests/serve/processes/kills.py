"""Kills workers while requests are under way: python -m tests.serve.processes.kills.

Callers ask over HTTP/1.1, by JSON and binary tensors, and by gRPC over HTTP/2, all the while.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.processes.asked import all_answer, asked_all_the_while, lose
from tests.serve.running import running

# Seconds from one kill to the next: one that lives for less than 2 s is followed after a pause.
_BETWEEN = 1.1
_WORKERS = 2


def kill(folder: Path, kills: int) -> dict[str, int]:
    """Returns what became of requests while so many workers were killed, in turn."""
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--deadline-ms", "1000"]
    with running(folder, *options, "--workers", str(_WORKERS), "--front", "haproxy") as service:
        until(lambda: all_answer(service))
        with asked_all_the_while(service) as asked:
            for number in range(kills):
                due = time.monotonic() + _BETWEEN
                lose(service, f"worker {number % _WORKERS + 1}")
                time.sleep(max(0.0, due - time.monotonic()))
                if sys.stderr.isatty():
                    print(f"\r{number + 1} of {kills}", end="", file=sys.stderr)
    for error in asked.lost[:5]:
        print(repr(error), file=sys.stderr)
    return {
        "kills": kills,
        "answered": asked.answered,
        "late": asked.late,
        "cut off by the front": asked.cut,
        "lost": len(asked.lost),
    }


def main() -> None:
    """Prints the counts. Ends with an error if a request was lost."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--kills", type=int, default=1000)
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = kill(Path(folder), arguments.kills)
    print(json.dumps(found))
    if found["lost"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
