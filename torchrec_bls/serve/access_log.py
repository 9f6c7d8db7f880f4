"""A line for each request, for whoever looks for one."""

import json
import sys
import time
from typing import TextIO

from torchrec_bls.serve.outcomes import Outcome


class AccessLog:
    """Writes a JSON object for each request that has ended.

    Args:
        file: where it writes. None: standard error.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr

    def write(
        self, protocol: str, outcome: Outcome, seconds: float, samples: int, queue_s: float | None
    ) -> None:
        """Writes the line of a request.

        Args:
            protocol: "http" or "grpc".
            outcome: how it ended.
            seconds: since its arrival.
            samples: its samples; 0 if they are not known.
            queue_s: seconds that it waited for its batch, or None.
        """
        line = {
            "time": round(time.time(), 6),
            "protocol": protocol,
            "outcome": outcome.label,
            "ms": round(seconds * 1e3, 3),
            "samples": samples,
            "queue_ms": None if queue_s is None else round(queue_s * 1e3, 3),
        }
        print(json.dumps(line), file=self._file, flush=True)
