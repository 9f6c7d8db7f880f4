"""Asks a service by the clients of others: tritonclient and KServe, over HTTP and gRPC.

    python -m tests.serve.outside.clients

Installs them into an environment of their own below build/, prints a line for each client, and
ends with status 1 if an answer differs from that of the plain model.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.serve import ranker
from tests.serve.asking import drawn
from tests.serve.outside.environment import python_with, run_in
from tests.serve.running import HOST, running

_PACKAGES = ("tritonclient[http,grpc]==2.73.0", "kserve==0.21.0")


def main() -> int:
    python = python_with("outside-clients", *_PACKAGES)
    cases = []
    for seed in range(100):
        case = drawn(1 + seed % 33, seed, weighted=seed % 3 == 0)
        tensors = case.at_once() if seed % 2 else case.ragged()
        cases.append(
            {
                "tensors": [{**each.head, "data": each.values.tolist()} for each in tensors],
                "scores": {name: each.tolist() for name, each in case.scores().items()},
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ranker.write_checkpoint(Path(folder), 1)
        options = ["--checkpoint", str(checkpoint), "--deadline-ms", "60000"]
        with running(Path(folder), *options) as service:
            said = {
                "http": f"{HOST}:{service.port}",
                "grpc": service.grpc,
                "model": service.name,
                "cases": cases,
            }
            # Each in a process of its own: both register the messages of the protocol.
            modules = ["tests.serve.outside.triton_calls", "tests.serve.outside.kserve_calls"]
            return max(run_in(python, each, json.dumps(said), 600) for each in modules)


if __name__ == "__main__":
    sys.exit(main())
