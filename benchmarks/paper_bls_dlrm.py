"""The plain DLRM over several backends: Fig. 7 and 8 of the BLS paper."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from delays_ranks import rotated
from dlrm_plain.data import DENSE_FEATURES, Batch
from dlrm_plain.exchange import EmbeddingExchange, Start, over
from dlrm_plain.inference import infer
from dlrm_plain.model import Dlrm
from dlrm_plain.run import make_group
from paper_bls_mpi import MpiBackend
from torchrec.datasets.utils import Batch as TorchRecBatch
from tqdm import tqdm

from torchrec_bls.datasets import CriteoDataset, SyntheticDataset, capped_cardinalities

_SEED = 13
_MAX_TABLE_ROWS = 20_000
_EMBEDDING_DIM = 64
_WARM_UP = 3


@dataclass(frozen=True)
class DlrmSettings:
    """What the plain DLRM runs.

    Attributes:
        bounds: bounds of the loop.
        steps: batches of a run.
        runs: runs of each backend at each bound.
        rows: rows of a rank's part of a batch.
        max_delay: each rank is late by 0 to this in each batch, seconds.
        max_ids: each row has from 1 to this many ids in each table.
        data: Criteo file, repeated as often as needed; None: generated rows.
    """

    bounds: tuple[int, ...]
    steps: int
    runs: int
    rows: int
    max_delay: float = 0.0
    max_ids: int = 1
    data: str | None = None


def measure(stage: str, given: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each backend and bound.

    "step_ms" is the time from one batch to the next, by run and rank; "result_ms", likewise, the
    mean time from a batch's begin to its logits.

    Raises:
        RuntimeError: some backend or bound gives other logits.
    """
    settings = DlrmSettings(**given)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows_per_table = capped_cardinalities(_MAX_TABLE_ROWS)
    model = Dlrm(
        rank,
        ranks,
        rows_per_table=rows_per_table,
        dense_features=DENSE_FEATURES,
        embedding_dim=_EMBEDDING_DIM,
    )
    batches = _load(settings, rank, ranks, model.own_tables, rows_per_table)
    random = np.random.default_rng([_SEED, ranks])
    delays = random.uniform(0, settings.max_delay, (ranks, settings.steps))[rank].tolist()
    starts = _starts(settings, model, mpi)
    names = list(dict.fromkeys(name for name, _ in starts))
    entries = {
        key: {"backend": key[0], "bound": key[1], "step_ms": [], "result_ms": []} for key in starts
    }
    expected = None
    total = settings.runs * len(starts)
    with torch.no_grad(), tqdm(total=total, disable=rank != 0, desc=stage, unit="run") as bar:
        for run in range(settings.runs):
            for bound in settings.bounds:
                for name in rotated(names, run):
                    exchange = EmbeddingExchange(model, settings.rows, starts[name, bound])
                    list(infer(model, batches[:_WARM_UP], exchange, bound))
                    dist.barrier()
                    step, result, logits = _run(model, batches, delays, exchange, bound)
                    everyone: list[Any] = [None] * ranks
                    dist.all_gather_object(everyone, {"step_ms": step, "result_ms": result})
                    for kind in ("step_ms", "result_ms"):
                        entries[name, bound][kind].append(
                            [1e3 * of_rank[kind] for of_rank in everyone]
                        )
                    if logits != (expected := expected or logits):
                        raise RuntimeError(f"{name} at bound {bound} gives other logits")
                    bar.update()
    return list(entries.values())


def _starts(
    settings: DlrmSettings, model: Dlrm, mpi: MpiBackend | None
) -> dict[tuple[str, int], Start]:
    largest = EmbeddingExchange.largest_message(model, settings.rows)
    starts: dict[tuple[str, int], Start] = {}
    for bound in settings.bounds:
        for backend in ("gloo", "bls"):
            starts[backend, bound] = over(make_group(backend, bound, largest))
        if mpi is not None:
            starts["mpi", bound] = mpi.start
    return starts


def _run(
    model: Dlrm,
    batches: Sequence[Batch],
    delays: Sequence[float],
    exchange: EmbeddingExchange,
    bound: int,
) -> tuple[float, float, str]:
    """Returns seconds per batch, seconds from a batch's begin to its logits, and their digest."""
    begun: list[float] = []
    ended: list[float] = []
    digest = hashlib.sha256()

    def late() -> Iterator[Batch]:
        for batch, delay in zip(batches, delays, strict=True):
            begun.append(time.monotonic())
            time.sleep(delay)
            yield batch

    for logits in infer(model, late(), exchange, bound):
        ended.append(time.monotonic())
        digest.update(logits.numpy().tobytes())
    waits = [end - begin for begin, end in zip(begun, ended, strict=True)]
    return (ended[-1] - begun[0]) / len(ended), sum(waits) / len(waits), digest.hexdigest()


def _load(
    settings: DlrmSettings, rank: int, ranks: int, own_tables: range, rows_per_table: list[int]
) -> list[Batch]:
    """Reads all batches before anything is timed, as the paper does (sec. V-C)."""
    whole = settings.rows * ranks
    source: Any
    if settings.data is None:
        source = SyntheticDataset(
            rows_per_table=rows_per_table,
            batch_size=whole,
            steps=settings.steps,
            seed=_SEED,
            max_ids_per_table=settings.max_ids,
        )
    else:
        dataset = CriteoDataset(
            Path(settings.data), rows_per_table=rows_per_table, batch_size=whole
        )
        full = [batch for batch in dataset if len(batch.labels) == whole]
        if not full:
            raise RuntimeError(f"{settings.data} has fewer rows than a batch, which is {whole}")
        source = islice(cycle(full), settings.steps)
    return [_own_part(batch, rank, settings.rows, own_tables) for batch in source]


def _own_part(batch: TorchRecBatch, rank: int, rows: int, own_tables: range) -> Batch:
    features = list(batch.sparse_features.to_dict().values())
    return Batch(
        dense=batch.dense_features[rank * rows : (rank + 1) * rows],
        ids=[features[table].values() for table in own_tables],
        offsets=[features[table].offsets()[:-1].long() for table in own_tables],
    )
