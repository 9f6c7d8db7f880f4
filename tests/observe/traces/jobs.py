"""Jobs whose true times are known, and the traces that their ranks would write."""

from __future__ import annotations

from typing import Any

import numpy as np

_LATENCY_US = 30.0
_PUT_US, _READ_US = 20.0, 10.0
CHANNELS = ("ebc.table_wise.ids", "ebc.table_wise.embeddings")


def run_job(
    load_us: np.ndarray, lookup_us: np.ndarray, dense_us: np.ndarray, bound: int = 0
) -> tuple[np.ndarray, float]:
    """Returns (channel, post or wait, begin or end, ranks, batches) microseconds, and a mean step.

    The steps of BoundedLagPipeline, each rank on a core of its own; (ranks, batches) durations.
    """
    ranks, batches = load_us.shape
    times = np.zeros((2, 2, 2, ranks, batches))
    now = np.zeros(ranks)

    def post(channel: int, batch: int) -> None:
        nonlocal now
        times[channel, 0, 0, :, batch] = now
        now = now + _PUT_US
        times[channel, 0, 1, :, batch] = now

    def wait(channel: int, batch: int) -> None:
        nonlocal now
        times[channel, 1, 0, :, batch] = now
        now = np.maximum(now, times[channel, 0, 1, :, batch].max() + _LATENCY_US) + _READ_US
        times[channel, 1, 1, :, batch] = now

    for step in range(batches + 2 * bound):
        if step < batches:
            now = now + load_us[:, step]
            post(0, step)
        if 0 <= step - bound < batches:
            wait(0, step - bound)
            now = now + lookup_us[:, step - bound]
            post(1, step - bound)
        if step >= 2 * bound:
            wait(1, step - 2 * bound)
            now = now + dense_us[:, step - 2 * bound]
    return times, float(now.max()) / batches


def traces_of(
    times: np.ndarray, offsets_us: np.ndarray, bound: int = 0, first: int = 0
) -> list[dict[str, Any]]:
    """Returns the content of each rank's trace."""
    _, _, _, ranks, batches = times.shape
    traces = []
    for rank in range(ranks):
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 4711, "args": {"name": "python"}},
            {
                "ph": "X",
                "name": "aten::add",
                "pid": 4711,
                "tid": 1,
                "ts": float(offsets_us[rank]),
                "dur": 1.0,
            },
            {"ph": "s", "id": 7, "pid": 4711, "tid": 1, "ts": float(offsets_us[rank]), "name": "a"},
        ]
        for channel, name in enumerate(CHANNELS):
            for action, said in enumerate(("post", "wait")):
                for batch in range(batches):
                    begin, end = times[channel, action, :, rank, batch]
                    text = f"bls::{name} {said} seq={first + batch} lag=0 bound={bound}"
                    events.append(
                        {
                            "ph": "X",
                            "name": text,
                            "pid": 4711,
                            "tid": 1,
                            "ts": float(begin + offsets_us[rank]),
                            "dur": float(end - begin),
                        }
                    )
        traces.append({"distributedInfo": {"rank": rank}, "traceEvents": events})
    return traces
