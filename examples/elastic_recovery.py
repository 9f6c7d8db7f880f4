"""A run that survives the death of a rank: finished results stay, the others are made again.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic_recovery.py --kill 1:12

Rank 1 is killed before iteration 12. The other rank raises PeerDiedError at once. torchrun starts
all ranks again, and they form a new group with new channels. They continue after the last iteration
whose results every rank has saved.

This is for one torchrun agent, so for one host: several agents count restarts apart, and their
ranks would wait for each other under different keys.
"""

import argparse
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from quickstart import CPU, Model, hide_warnings_of_others, make_batch
from torchrec.distributed import DistributedModelParallel

from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BoundedLagPipeline

ITERATIONS = 20


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kill", metavar="RANK:ITERATION", help="kill a rank, the first time")
    parser.add_argument("--out", type=Path, default=Path("out/recovery"), help="folder of results")
    return parser.parse_args()


def save(folder: Path, iteration: int, output: torch.Tensor) -> None:
    """Saves a result so that the file is either complete or absent."""
    partial = folder / "partial"
    torch.save(output, partial)
    partial.rename(folder / f"{iteration}.pt")


def first_unfinished(folder: Path) -> int:
    """Returns the first iteration that not every rank has saved."""
    iteration = 0
    while (folder / f"{iteration}.pt").exists():
        iteration += 1
    agreed = torch.tensor(iteration)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed)


def form_group(restarts: int) -> None:
    """Makes the default group, with its own keys in torchrun's store. The store survives the ranks:
    with old keys gloo would find the addresses of the processes before the restart."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"after {restarts} restarts", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def main() -> None:
    """Runs the iterations that are not finished yet."""
    arguments = parse_arguments()
    hide_warnings_of_others()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    form_group(restarts)
    torch.set_num_threads(1)
    folder = arguments.out / f"rank{dist.get_rank()}"
    if restarts == 0:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    first = first_unfinished(folder)
    torch.manual_seed(0)  # load your weights instead
    model = DistributedModelParallel(
        Model(),
        device=CPU,
        sharders=[BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=2))],
        init_data_parallel=False,
    )
    pipeline = BoundedLagPipeline(model)
    batches = (make_batch(iteration) for iteration in range(first, ITERATIONS))
    for iteration in range(first, ITERATIONS):
        if restarts == 0 and arguments.kill == f"{dist.get_rank()}:{iteration}":
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder, iteration, pipeline.progress(batches))
    dist.barrier()
    if dist.get_rank() == 0:
        print(
            f"{ITERATIONS} iterations finished after {restarts} restarts; the results of the first "
            f"{first} were there"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
