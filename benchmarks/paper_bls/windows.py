"""Exchanges with a window under random delays, or with messages of random sizes."""

from typing import Any

import numpy as np
import torch.distributed as dist
from dlrm_plain.exchange import over

from benchmarks.delays.exchanges import (
    LIMIT_SECONDS,
    ChannelExchange,
    Exchange,
    TorchExchange,
    Words,
)
from benchmarks.delays.sleep import computed_ideal, draw_delays, measure_windows
from benchmarks.exchange.peers import HEADER_ROOM
from benchmarks.paper_bls.mpi import MpiBackend
from torchrec_bls import BLSOptions

_SEED = 11


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each exchange and bound, with the ms per step of the runs.

    "shm" and "c10d" are channels of these transports, read in place; "gloo", "bls" and "mpi" are
    asynchronous all-to-alls of a backend, which copy into the caller's memory.

    Args:
        stage: title of the progress bar.
        settings: `bounds`; `steps` of a run; `runs`; `max_delay` of a rank before each post and the
            sleep `dense`, seconds; smallest and largest message `kib`, drawn by step and pair.
        mpi: what all ranks share, if it is measured.
    """
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), settings["steps"]
    delays = draw_delays(_SEED, ranks, steps, settings["max_delay"])
    low, high = settings["kib"]
    random = np.random.default_rng([_SEED, ranks, low])
    words = 128 * random.integers(low, high, (steps, ranks, ranks), endpoint=True)
    words[:, range(ranks), range(ranks)] = 0  # nobody moves a rank's own block
    exchanges = {bound: _exchanges(rank, words, bound, mpi) for bound in settings["bounds"]}
    times = measure_windows(exchanges, delays, settings["dense"], settings["runs"], stage)
    return [
        {
            "peer": name,
            "bound": bound,
            "computed_ideal_ms": computed_ideal(delays, settings["dense"], bound),
            "ms_per_step": [elapsed for elapsed, _ in runs],
        }
        for bound, peers in times.items()
        for name, runs in peers.items()
    ]


def _exchanges(rank: int, words: Words, bound: int, mpi: MpiBackend | None) -> dict[str, Exchange]:
    options = BLSOptions(
        bound=bound, slot_bytes=8 * int(words.max()) + HEADER_ROOM, deadline=LIMIT_SECONDS
    )
    starts = {
        "gloo": over(dist.new_group(backend="gloo")),
        "bls": over(dist.new_group(backend="bls", pg_options=options)),
        **({"mpi": mpi.start} if mpi else {}),
    }
    return {
        **{name: ChannelExchange(rank, words, bound, name) for name in ("shm", "c10d")},
        **{name: TorchExchange(rank, words, bound, start) for name, start in starts.items()},
    }
