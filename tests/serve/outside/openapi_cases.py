"""Asks a service what its description allows and forbids, as schemathesis draws it.

    python -m tests.serve.outside.openapi_cases --cases 10000

Installs schemathesis into an environment of its own below build/, prints how often each status came
and ends with status 1 after a status of 500 or above that is no refusal by the deadline (503, 504)
or a connection that broke.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.serve import ranker
from tests.serve.outside.environment import python_with, run_in
from tests.serve.running import HOST, running

_PACKAGES = ("schemathesis==4.32.5",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="how many (10,000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    python = python_with("outside-openapi", *_PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ranker.write_checkpoint(Path(folder), 1)
        deadline = ["--deadline-ms", "60000"]
        with running(Path(folder), "--checkpoint", str(checkpoint), *deadline) as service:
            said = {
                "url": f"http://{HOST}:{service.port}",
                "cases": options.cases,
                "seed": options.seed,
            }
            status = run_in(python, "tests.serve.outside.case_calls", json.dumps(said), 1800)
            assert service.ready()
            return status


if __name__ == "__main__":
    sys.exit(main())
