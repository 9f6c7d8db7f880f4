"""The plain DLRM over several backends: Fig. 7 and 8 of the BLS paper."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlrm_plain.data import DENSE_FEATURES, Batch
from dlrm_plain.exchange import EmbeddingExchange, Start, over
from dlrm_plain.inference import infer
from dlrm_plain.model import Dlrm
from dlrm_plain.run import make_group
from torchrec.datasets.utils import Batch as TorchRecBatch
from tqdm import tqdm

from benchmarks.delays.sleep import draw_delays
from benchmarks.harness.launch import gathered, rotated
from benchmarks.paper_bls.mpi import MpiBackend
from torchrec_bls.datasets import CriteoDataset, SyntheticDataset, capped_cardinalities

_SEED = 13
_MAX_TABLE_ROWS = 20_000
_EMBEDDING_DIM = 64
_WARM_UP = 3


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each backend and bound.

    "step_ms" is the time from one batch to the next, by run and rank; "result_ms", likewise, the
    mean time from a batch's begin to its logits.

    Args:
        stage: title of the progress bar.
        settings: `bounds`; `steps` of a run, in batches; `runs`; `rows` of a rank's part of a
            batch; perhaps `max_delay` of a rank in each batch, seconds, `max_ids` of a row in each
            table, and `data`, a Criteo file that is repeated as often as needed.
        mpi: what all ranks share, if it is measured.

    Raises:
        RuntimeError: some backend or bound gives other logits.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows_per_table = capped_cardinalities(_MAX_TABLE_ROWS)
    sizes = {"dense_features": DENSE_FEATURES, "embedding_dim": _EMBEDDING_DIM}
    model = Dlrm(rank, ranks, rows_per_table=rows_per_table, **sizes)
    batches = _load(settings, rank, ranks, model.own_tables, rows_per_table)
    longest = settings.get("max_delay", 0.0)
    delays = draw_delays(_SEED, ranks, settings["steps"], longest)[rank].tolist()
    starts = _starts(settings, model, mpi)
    names = list(dict.fromkeys(name for name, _ in starts))
    entries: dict[tuple[str, int], dict[str, Any]] = {
        key: {"backend": key[0], "bound": key[1], "step_ms": [], "result_ms": []} for key in starts
    }
    expected = None
    total = settings["runs"] * len(starts)
    with torch.no_grad(), tqdm(total=total, disable=rank != 0, desc=stage, unit="run") as bar:
        for run in range(settings["runs"]):
            for bound in settings["bounds"]:
                for name in rotated(names, run):
                    exchange = EmbeddingExchange(model, settings["rows"], starts[name, bound])
                    list(infer(model, batches[:_WARM_UP], exchange, bound))
                    dist.barrier()
                    *seconds, logits = _run(model, batches, delays, exchange, bound)
                    by_rank = zip(*gathered(seconds), strict=True)
                    for kind, each in zip(("step_ms", "result_ms"), by_rank, strict=True):
                        entries[name, bound][kind].append([1e3 * of_rank for of_rank in each])
                    if logits != (expected := expected or logits):
                        raise RuntimeError(f"{name} at bound {bound} gives other logits")
                    bar.update()
    return list(entries.values())


def _starts(
    settings: dict[str, Any], model: Dlrm, mpi: MpiBackend | None
) -> dict[tuple[str, int], Start]:
    largest = EmbeddingExchange.largest_message(model, settings["rows"])
    starts: dict[tuple[str, int], Start] = {}
    for bound in settings["bounds"]:
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
    settings: dict[str, Any], rank: int, ranks: int, own_tables: range, rows_per_table: list[int]
) -> list[Batch]:
    """Reads all batches before anything is timed, as the paper does (sec. V-C)."""
    whole, steps = settings["rows"] * ranks, settings["steps"]
    shape = {"rows_per_table": rows_per_table, "batch_size": whole}
    source: Any
    if settings.get("data") is None:
        ids = settings.get("max_ids", 1)
        source = SyntheticDataset(**shape, steps=steps, seed=_SEED, max_ids_per_table=ids)
    else:
        dataset = CriteoDataset(Path(settings["data"]), **shape)
        full = [batch for batch in dataset if len(batch.labels) == whole]
        if not full:
            raise RuntimeError(f"{settings['data']} has fewer rows than a batch, which is {whole}")
        source = islice(cycle(full), steps)
    return [_own_part(batch, rank, settings["rows"], own_tables) for batch in source]


def _own_part(batch: TorchRecBatch, rank: int, rows: int, own_tables: range) -> Batch:
    features = list(batch.sparse_features.to_dict().values())
    return Batch(
        dense=batch.dense_features[rank * rows : (rank + 1) * rows],
        ids=[features[table].values() for table in own_tables],
        offsets=[features[table].offsets()[:-1].long() for table in own_tables],
    )
