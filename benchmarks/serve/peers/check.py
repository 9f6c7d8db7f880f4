"""Checks that each server answers right, batches too: its scores beside those of plain TorchRec."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.serve import model, shape, traffic
from benchmarks.serve.generator import REQUESTS, Generator, Load
from benchmarks.serve.peers.running import KINDS, running
from benchmarks.serve.peers.serving import Batching, Serving

_RATE, _SECONDS, _MOST_DIFFERENCE = 300.0, 2.0, 1e-6
_PORT = 18_600
# Long, so that a busy machine makes nothing late.
_DEADLINE_MS = 500


def check(name: str, checkpoint: Path, int8: bool) -> tuple[int, float]:
    """Loads a server with small tables; returns the number of answers and the largest difference.

    Raises:
        RuntimeError: it failed a request, or answered a wrong number of scores.
    """
    serving = Serving(
        str(checkpoint), shape.QUICK_ROWS, int8, _PORT, Batching(8, 2), _DEADLINE_MS
    )
    kind = KINDS[name]
    with running(name, serving) as server:
        load = Load(
            server.url,
            kind.encoder(server.url),
            serving.rows,
            deadline_s=serving.deadline_ms / 1000,
            servers=server.processes,
        )
        with Generator(load) as generator:
            outcome = generator.run(_RATE, _SECONDS, keep=True)
    if outcome.failed or not outcome.kept:
        raise RuntimeError(f"{kind.title} failed: {outcome.failed}, refused: {outcome.refused}")
    reference = model.load(checkpoint, serving.rows, int8)
    asked = list(traffic.requests(REQUESTS, serving.rows))
    worst = 0.0
    for at, response in outcome.kept:
        with torch.inference_mode():
            expected = model.scores(reference, asked[at % REQUESTS]).numpy()
        scores = kind.decoder(response)
        if scores.shape != expected.shape:
            raise RuntimeError(f"{kind.title} answered {scores.shape}, not {expected.shape}")
        worst = max(worst, float(np.abs(scores - expected).max()))
    return len(outcome.kept), worst


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(KINDS)}")
    names = made.parse_args().names or list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "small"
        model.write_checkpoint(checkpoint, shape.QUICK_ROWS)
        wrong = []
        for name in names:
            for int8 in (False, True):
                answers, worst = check(name, checkpoint, int8)
                tables = "INT8" if int8 else "float"
                print(f"{name}, {tables}: {answers} answers, largest difference {worst:.1e}")
                if worst > _MOST_DIFFERENCE:
                    wrong.append(f"{name}, {tables}")
    if wrong:
        raise SystemExit(f"wrong scores: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
