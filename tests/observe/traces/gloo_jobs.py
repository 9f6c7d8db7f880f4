"""Jobs over gloo whose true times are known, and the traces that their ranks would write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

CALL_US, TOOK_US, LATENCY_US = 8.0, 40.0, 15.0
SENT_FLOATS = 1 << 16
IDS, EMBEDDINGS = 0, 1
MAIN, WORKERS = 1, (11, 12)


@dataclass
class GlooJob:
    """Steps of inference: loading, ids to their owners, lookup, embeddings back, other layers.

    Every rank has a core for each thread. A collective ends everywhere TOOK_US after the last rank
    has come. `calls` and `runs` are (2, begin or end, ranks, batches), of the op and the work.
    """

    load_us: np.ndarray
    lookup_us: np.ndarray
    dense_us: np.ndarray
    calls: np.ndarray = field(init=False)
    runs: np.ndarray = field(init=False)
    step_ends: np.ndarray = field(init=False)
    waited: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        ranks, batches = self.load_us.shape
        self.calls = np.zeros((2, 2, ranks, batches))
        self.runs = np.zeros((2, 2, ranks, batches))
        self.step_ends = np.zeros((ranks, batches))
        self.waited = np.zeros((ranks, batches))
        now = np.zeros(ranks)
        for batch in range(batches):
            now = now + self.load_us[:, batch]
            now = self._exchange(IDS, batch, now)
            now = now + self.lookup_us[:, batch]
            now = self._exchange(EMBEDDINGS, batch, now)
            now = now + self.dense_us[:, batch]
            self.step_ends[:, batch] = now

    def _exchange(self, which: int, batch: int, now: np.ndarray) -> np.ndarray:
        self.calls[which, :, :, batch] = now, now + CALL_US
        came = now + CALL_US + LATENCY_US
        self.runs[which, :, :, batch] = came, np.full_like(came, came.max() + TOOK_US)
        self.waited[:, batch] += came.max() - (now + CALL_US)
        return self.runs[which, 1, :, batch]

    @property
    def step_us(self) -> float:
        return float(self.step_ends.max()) / self.step_ends.shape[1]

    def traces(
        self, offsets_us: np.ndarray, *, recorded: bool = True, first_step: int = 0
    ) -> list[dict[str, Any]]:
        """Returns the content of each rank's trace of Kineto."""
        return [
            self._trace(rank, float(offset), recorded, first_step)
            for rank, offset in enumerate(offsets_us)
        ]

    def _trace(self, rank: int, offset: float, recorded: bool, first: int) -> dict[str, Any]:
        ranks, batches = self.load_us.shape
        events: list[dict[str, Any]] = []
        ids = count(1)

        def event(name: str, thread: int, begin: float, end: float, category: str) -> None:
            events.append(
                {
                    "ph": "X",
                    "cat": category,
                    "name": name,
                    "pid": 4711,
                    "tid": thread,
                    "ts": begin + offset,
                    "dur": end - begin,
                    "args": {"Record function id": next(ids)} if recorded else {},
                }
            )

        begin = 0.0
        for batch in range(batches):
            end = float(self.step_ends[rank, batch])
            event(f"ProfilerStep#{first + batch}", MAIN, begin, end, "user_annotation")
            for which, work in ((IDS, self.lookup_us), (EMBEDDINGS, self.dense_us)):
                call, run = self.calls[which, :, rank, batch], self.runs[which, :, rank, batch]
                event("c10d::alltoall_base_", MAIN, *call, "cpu_op")
                worker = WORKERS[(2 * batch + which + rank) % 2]
                event("gloo:all_to_all", worker, *run, "user_annotation")
                done = float(run[1])
                event("aten::addmm", MAIN, done, done + work[rank, batch], "cpu_op")
            begin = end
        collectives = [
            {
                "name": "gloo:all_to_all",
                "group": "0",
                "sequence": 100 + number,
                "input_sizes": [[SENT_FLOATS // 64, 64]],
                "input_dtypes": ["Float"],
            }
            for number in range(2 * batches)
        ]
        group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": []}
        metadata = {"format": 1, "steps": first + batches, "collectives": collectives}
        return {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": ranks, "pg_config": [group]},
            "traceEvents": events,
            **({"torchrec_bls": metadata} if recorded else {}),
        }


def written(folder: Path, traces: list[dict[str, Any]]) -> list[Path]:
    """Writes a file for each rank, and returns their paths."""
    paths = [folder / f"rank{number}.json" for number in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace))
    return paths
