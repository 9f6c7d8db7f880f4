"""Checks that each peer answers right, batches too: its scores beside those of TorchRec alone.

Peers have small tables.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.serve import model, shape, traffic
from benchmarks.serve.generator import REQUESTS, Generator, Load
from benchmarks.serve.peers import wire
from benchmarks.serve.peers.grid import SETTINGS
from benchmarks.serve.peers.running import PEERS, running
from benchmarks.serve.peers.serving import Batching, Serving
from benchmarks.serve.service import GENERATOR_CORE, free_port

# So many a second that batches of several form.
_RATE, _SECONDS, _BATCHING = 300.0, 2.0, Batching(8, 2)
# Long, so that a busy machine makes nothing late.
_DEADLINE_MS = 500
_MOST_DIFFERENCE = 1e-6


def check(name: str, checkpoint: Path, tables: str) -> tuple[int, float]:
    """Returns the number of answers of a peer, and the largest difference of a score.

    Raises:
        RuntimeError: it failed a request, or answered a wrong number of scores.
    """
    serving = Serving(
        str(checkpoint), shape.QUICK_ROWS, tables, free_port(), _BATCHING, _DEADLINE_MS, None
    )
    peer = PEERS[name]
    with running(name, serving) as service:
        load = Load(service.url, peer.encode, serving.rows, GENERATOR_CORE)
        with Generator(load) as generator:
            outcome = generator.run(_RATE, _SECONDS, keep=True)
    if outcome.failed or not outcome.kept:
        raise RuntimeError(f"{peer.title} failed {outcome.failed}, refused {outcome.refused}")
    reference = model.load(checkpoint, serving.rows, int8=tables == "INT8")
    asked = list(traffic.requests(REQUESTS, serving.rows))
    worst = 0.0
    for at, response in outcome.kept:
        with torch.inference_mode():
            expected = model.scores(reference, asked[at % REQUESTS]).numpy()
        scores = wire.scores_of(response)
        if scores.shape != expected.shape:
            raise RuntimeError(f"{peer.title} answered {scores.shape}, not {expected.shape}")
        worst = max(worst, float(np.abs(scores - expected).max()))
    return len(outcome.kept), worst


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SETTINGS)}")
    names = made.parse_args().names or list(SETTINGS)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        model.write_checkpoint(checkpoint, shape.QUICK_ROWS)
        for name in names:
            for tables in model.BUILDS[shape.QUICK_ROWS]:
                answers, worst = check(name, checkpoint, tables)
                print(f"{name}, {tables}: {answers} answers, largest difference {worst:.1e}")
                if worst > _MOST_DIFFERENCE:
                    wrong.append(f"{name}, {tables}")
    if wrong:
        raise SystemExit(f"wrong scores: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
