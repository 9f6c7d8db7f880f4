"""What compressors make of lookups while a model is trained in full precision."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from benchmarks.bounded import frames, sizes
from benchmarks.bounded.paper import BATCHES, BOUNDS
from benchmarks.harness.record import Record
from torchrec_bls import _native

#: Of all tables, as the paper's Tables III to VI seem to have it, and what its Table IV says.
BOUND, ETA_BOUNDS = BOUNDS["S"], (0.01, 0.005)
#: Sixteen batches of 128 rows, two of 2,048.
_BATCHES = (16, 2)
CHUNKS = (1, 2, 4, 8, 16)
#: Shares of the training after which lookups are looked at.
PHASES = (0.0, 0.25, 0.5, 1.0)
#: Edges of the bars of a histogram.
EDGES = np.linspace(-0.42, 0.42, 22)
#: Tables whose histograms are kept: one of many rows, one of three in Criteo's shape.
SHOWN = (14, 8)
_TURNS = 15

Ids = npt.NDArray[np.int64]
LookUp = Callable[[torch.Tensor], torch.Tensor]  # of ids


def of_batches(look_up: LookUp, ids: Ids) -> dict[str, Record]:
    """By size of a batch: bytes and features of each table, summed over batches."""
    found = {}
    for size, count, eta_bound in zip(BATCHES, _BATCHES, ETA_BOUNDS, strict=True):
        firsts = range(0, min(count * size, max(size, len(ids) - size + 1)), size)
        of_size = [_of_batch(look_up, ids[first : first + size], eta_bound) for first in firsts]
        found[str(size)] = {
            name: np.sum([batch[name] for batch in of_size], axis=0).tolist() for name in of_size[0]
        }
    return found


def _of_batch(look_up: LookUp, ids: Ids, eta_bound: float) -> dict[str, list]:
    lookups = look_up(torch.from_numpy(ids))
    tables = [lookups[:, table].numpy().copy() for table in range(lookups.shape[1])]
    ours = sizes.ours(lookups, ids, [BOUND] * len(tables))
    found = []
    for rows, of_ours in zip(tables, ours, strict=True):
        codes = sizes.quantized(rows, BOUND)
        left = sizes.lorenzo(codes)
        found.append(
            {
                "fp32": rows.nbytes,
                **sizes.of_table(codes),
                **of_ours,
                "patterns": sizes.distinct(rows),
                "patterns quantized": sizes.distinct(sizes.quantized(rows, eta_bound)),
                "patterns in codes": sizes.distinct(codes),
                "patterns predicted": sizes.distinct(left),
                "entropy": sizes.entropy(codes) * codes.size,
                "entropy predicted": sizes.entropy(left) * codes.size,
                "kurtosis": float(stats.kurtosis(rows, axis=None)) * codes.size,
            }
        )
    return {name: [each[name] for each in found] for name in found[0]}


def etas(lookups: torch.Tensor, bound: float) -> list[float]:
    """Equation 1 for each table: how many different rows become equal to others."""
    return [
        1 - sizes.distinct(sizes.quantized(rows, bound)) / sizes.distinct(rows)
        for rows in lookups.transpose(0, 1).numpy()
    ]


def phase(lookups: torch.Tensor) -> Record:
    """How the values of a batch are distributed, and how small it becomes."""
    return {
        "ratio": lookups.nbytes / frames.round_trip(lookups, [BOUND] * lookups.shape[1])[1],
        "deviation": lookups.std(dim=(0, 2)).median().item(),
        "histograms": [
            np.histogram(lookups[:, table].clip(EDGES[0], EDGES[-1]), EDGES)[0].tolist()
            for table in SHOWN
        ],
    }


def speeds(lookups: torch.Tensor, ids: Ids) -> list[Record]:
    """Bytes of float32 that a thread encodes and decodes in a second of its time."""
    bounds, arrived = [BOUND] * lookups.shape[1], torch.empty_like(lookups)
    groups, data = frames.groups_of(ids), frames.room(lookups)
    ways = {"ours": (None,), "with ids": (groups,), "fixed width": (groups, True)}
    found = []
    for way, how in ways.items():
        sent, received = (frames.frame(where, bounds, *how) for where in (lookups, arrived))
        size = frames.encode(sent, data)
        encoding = _seconds(partial(frames.encode, sent, data))
        decoding = _seconds(partial(frames.decode, data, size, received))
        record = {"rows": len(ids), "way": way, "ratio": lookups.nbytes / size}
        record |= {"encode": lookups.nbytes / encoding, "decode": lookups.nbytes / decoding}
        found.append(record)
    return found


def chunks(lookups: torch.Tensor) -> list[Record]:
    """A batch that is cut into chunks: a frame for each, and a frame for each of its tables."""
    bounds, data, found = [BOUND] * lookups.shape[1], frames.room(lookups), []
    for count in CHUNKS:
        parts = lookups.chunk(count)
        whole = [frames.frame(part, bounds) for part in parts]
        apart = [frames.frame(part, bounds, only=t) for part in parts for t in range(len(bounds))]
        of_count: Record = {"chunks": count}
        for name, how in (("whole", whole), ("apart", apart)):
            of_count[name] = {
                "bytes": sum(frames.encode(each, data) for each in how),
                "seconds": _seconds(partial(_encode_all, how, data)),
            }
        found.append(of_count)
    return found


def _encode_all(of_frames: list[_native.Frame], data: torch.Tensor) -> None:
    for each in of_frames:
        frames.encode(each, data)


def _seconds(call: Callable[[], object]) -> float:
    """The median of what some calls take of this thread's time."""
    taken = []
    for _ in range(_TURNS):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return median(taken)
