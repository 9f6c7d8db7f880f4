"""Runs the plain DLRM, started by `torchrun --nproc-per-node 4 examples/dlrm_plain/run.py`.

The logits do not depend on backend and bound: the printed digest is always the same.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))
from dlrm_plain.data import DENSE_FEATURES, ROWS_PER_TABLE, Batch, generate
from dlrm_plain.exchange import EmbeddingExchange, over
from dlrm_plain.inference import infer
from dlrm_plain.model import Dlrm

ROWS, EMBEDDING_DIM = 64, 64
_HEADER_ROOM = 256


def make_group(backend: str, bound: int, largest_message: int) -> dist.ProcessGroup:
    """Makes the group of the embeddings' all-to-all beside the default one."""
    if backend == "gloo":
        return dist.new_group(backend="gloo")
    import torchrec_bls

    options = torchrec_bls.BLSOptions(bound=bound, slot_bytes=largest_message + _HEADER_ROOM)
    return dist.new_group(backend="bls", pg_options=options)


def delayed(batches: Iterable[Batch], rank: int, longest: float) -> Iterator[Batch]:
    """Hands every batch out after a random delay of up to `longest` seconds."""
    source = random.Random(rank)
    for batch in batches:
        time.sleep(source.uniform(0, longest))
        yield batch


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["gloo", "bls"], default="bls")
    parser.add_argument("--bound", type=int, default=0, help="batches that ranks may be apart")
    parser.add_argument("--steps", type=int, default=100, help="batches")
    parser.add_argument("--max-delay-ms", type=float, default=10.0, help="longest delay of a batch")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Dlrm(
        rank,
        ranks,
        rows_per_table=ROWS_PER_TABLE,
        dense_features=DENSE_FEATURES,
        embedding_dim=EMBEDDING_DIM,
    )
    group = make_group(
        options.backend, options.bound, EmbeddingExchange.largest_message(model, ROWS)
    )
    exchange = EmbeddingExchange(model, ROWS, over(group))
    batches = list(generate(rank, ranks, model.own_tables, rows=ROWS, steps=options.steps))
    late_batches = delayed(batches, rank, options.max_delay_ms / 1e3)
    with torch.no_grad():
        list(infer(model, batches[:1], exchange, options.bound))  # connects the ranks
        dist.barrier()
        start = time.perf_counter()
        logits = torch.cat(list(infer(model, late_batches, exchange, options.bound)))
    seconds = time.perf_counter() - start
    everyone = [torch.empty_like(logits) for _ in range(ranks)]
    dist.all_gather(everyone, logits)
    if rank == 0:
        digest = hashlib.sha256(torch.cat(everyone).numpy().tobytes()).hexdigest()
        print(
            f"{ranks} ranks over {options.backend}, bound {options.bound}: "
            f"{1e3 * seconds / options.steps:.2f} ms a batch, logits {digest[:16]}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
