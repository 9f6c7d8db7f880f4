"""What a peer's server is told, by one variable, since each has a command line of its own."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "BENCHMARKS_SERVE_PEER"


@dataclass(frozen=True)
class Batching:
    """How a peer makes batches.

    Attributes:
        requests: of a batch, at most.
        wait_ms: how long a request waits for others at most, in ms; None: the peer has no such
            setting.
    """

    requests: int
    wait_ms: float | None


@dataclass(frozen=True)
class Serving:
    """One start of a peer's server.

    Attributes:
        checkpoint: folder of the weights, as `model.write_checkpoint` writes them.
        rows: of each table.
        tables: what they hold, "float" or "INT8".
        port: on 127.0.0.1.
        batching: how it makes batches.
        deadline_ms: what is later than this is refused, where the peer can.
        queue: requests that wait at most, where the peer has a limit; None: its default.
        workers: processes with the model.
        folder: for files of this start, in which each worker leaves one once it can answer; None:
            they leave none.
    """

    checkpoint: str
    rows: int
    tables: str
    port: int
    batching: Batching
    deadline_ms: int
    queue: int | None
    workers: int = 1
    folder: str | None = None

    def ready(self) -> Path:
        """Where workers leave files that are named by their process numbers."""
        if self.folder is None:
            raise ValueError("this start has no folder")
        path = Path(self.folder) / "ready"
        path.mkdir(exist_ok=True)
        return path

    def environment(self) -> dict[str, str]:
        """The variable that tells it."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}


def told() -> Serving:
    """What this process was told."""
    fields = json.loads(os.environ[_VARIABLE])
    return Serving(**{**fields, "batching": Batching(**fields["batching"])})
