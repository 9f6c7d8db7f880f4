"""The plain DLRM over several backends: Fig. 7 and 8 of the BLS paper."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from dlrm_plain.data import DENSE_FEATURES, ROWS_PER_TABLE, Batch
from dlrm_plain.exchange import EmbeddingExchange
from dlrm_plain.inference import infer
from dlrm_plain.model import Dlrm
from dlrm_plain.run import EMBEDDING_DIM

from benchmarks.delays.exchanges import draw_delays
from benchmarks.harness.launch import gathered
from benchmarks.harness.statistics import taking_turns
from benchmarks.paper_bls.windows import MpiBackend, starts
from torchrec_bls.datasets import CriteoDataset, SyntheticDataset

_SEED = 13
_WARM_UP = 3


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each backend and bound.

    "step_ms" is the time from one batch to the next, by run and rank; "result_ms", likewise, the
    mean time from a batch's begin to its logits.

    `settings` have `bounds`; `steps` of a run, in batches; `runs`; `rows` of a rank's part of a
    batch; perhaps `max_delay` of a rank in each batch, seconds, `max_ids` of a row in each table,
    and `data`, a Criteo file that is repeated as often as needed. Other logits of some backend or
    bound are an error.
    """
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), settings["rows"]
    sizes = {"dense_features": DENSE_FEATURES, "embedding_dim": EMBEDDING_DIM}
    model = Dlrm(rank, ranks, rows_per_table=ROWS_PER_TABLE, **sizes)
    batches = _load(settings, model.own_tables)
    delays = draw_delays(_SEED, ranks, settings["steps"], settings.get("max_delay", 0.0))
    largest = EmbeddingExchange.largest_message(model, rows)
    own_delays = delays[rank].tolist()
    runs: dict[tuple[int, str], Callable[[], Any]] = {}
    for bound in settings["bounds"]:
        for name, start in starts(bound, largest, mpi).items():
            exchange = EmbeddingExchange(model, rows, start)
            served = partial(infer, model, exchange=exchange, bound=bound)
            runs[bound, name] = partial(_run, batches, own_delays, served)
    with torch.no_grad():
        results = taking_turns(runs, settings["runs"], stage)
    entries, expected = [], results[0, "gloo"][0][-1]
    for (bound, backend), of_case in results.items():
        steps, waits, logits = zip(*of_case, strict=True)
        if set(logits) != {expected}:
            raise RuntimeError(f"{backend} at bound {bound} gives other logits")
        times = {"step_ms": steps, "result_ms": waits}
        entries.append({"backend": backend, "bound": bound, **times})
    return entries


def _run(
    batches: Sequence[Batch],
    delays: Sequence[float],
    served: Callable[[Iterable[Batch]], Iterator[torch.Tensor]],
) -> tuple[list[float], list[float], str]:
    """Returns what an entry has of a run, by rank, and the digest of this rank's logits."""
    begun: list[float] = []
    ended: list[float] = []
    digest = hashlib.sha256()

    def late() -> Iterator[Batch]:
        for batch, delay in zip(batches, delays, strict=True):
            begun.append(time.monotonic())
            time.sleep(delay)
            yield batch

    list(served(batches[:_WARM_UP]))
    dist.barrier()
    for logits in served(late()):
        ended.append(time.monotonic())
        digest.update(logits.numpy().tobytes())
    step = (ended[-1] - begun[0]) / len(ended)
    wait = fmean(end - begin for begin, end in zip(begun, ended, strict=True))
    return gathered(1e3 * step), gathered(1e3 * wait), digest.hexdigest()


def _load(settings: dict[str, Any], own_tables: range) -> list[Batch]:
    """Reads this rank's part of all batches before anything is timed (BLS paper, sec. V-C)."""
    rank, rows, steps = dist.get_rank(), settings["rows"], settings["steps"]
    whole = rows * dist.get_world_size()
    shape = {"rows_per_table": ROWS_PER_TABLE, "batch_size": whole}
    if settings.get("data"):
        source = CriteoDataset(Path(settings["data"]), **shape)
    else:
        ids = settings.get("max_ids", 1)
        source = SyntheticDataset(**shape, steps=steps, seed=_SEED, max_ids_per_table=ids)
    batches = []
    for batch in islice(cycle(each for each in source if len(each.labels) == whole), steps):
        features = list(batch.sparse_features.to_dict().values())
        ids = [features[table].values() for table in own_tables]
        offsets = [features[table].offsets()[:-1].long() for table in own_tables]
        batches.append(Batch(batch.dense_features[rank * rows : (rank + 1) * rows], ids, offsets))
    if not batches:
        raise RuntimeError(f"{settings['data']} has fewer rows than a batch, which is {whole}")
    return batches
