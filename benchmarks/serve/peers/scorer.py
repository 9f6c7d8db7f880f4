"""The benchmark's model in a peer: whole tables, plain TorchRec, one thread."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.serve import model, traffic
from benchmarks.serve.peers import wire
from benchmarks.serve.peers.serving import Serving

_WARM_UP_BATCHES = 50


class Scorer:
    """Answers the requests of a batch by one forward. It is warmed up."""

    def __init__(self, serving: Serving) -> None:
        torch.set_num_threads(1)
        self._model = model.load(
            Path(serving.checkpoint), serving.rows, int8=serving.tables == "INT8"
        )
        bodies = [
            wire.encode(request, "/").partition(b"\r\n\r\n")[2]
            for request in traffic.requests(_WARM_UP_BATCHES, serving.rows, seed=1)
        ]
        for count in range(1, _WARM_UP_BATCHES):
            self(bodies[: 1 + count % serving.batching.requests])
        if serving.folder is not None:
            (serving.ready() / str(os.getpid())).touch()

    @torch.inference_mode()
    def __call__(self, bodies: Sequence[bytes]) -> list[bytes]:
        """The bodies of the answers to the bodies of requests.

        Raises:
            ValueError: a body is no request.
        """
        scores = model.scores(self._model, wire.joined(bodies))
        return wire.parted(scores.numpy(), bodies)


def hush() -> None:
    """Logs nothing: in overload servers write a line or a traceback for each request refused."""
    logging.disable(logging.CRITICAL)
