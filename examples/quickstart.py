"""A TorchRec model with bounded-lag exchanges, run by `torchrun --nproc-per-node 2`."""

import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    bounded_lag_channels,
)
from torchrec_bls.observe import gather_report

CPU, FEATURES, ROWS, DIM = torch.device("cpu"), ["user", "item"], 10_000, 32


class Model(nn.Module):
    """Stands for a model of your own: embeddings, then anything dense."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{name}_table", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=CPU)
        self.dense = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns one logit per sample."""
        pooled = self.embeddings(batch.sparse_features)
        # By key: in which order a sharded module has its columns depends on the plan.
        return self.dense(torch.cat([pooled[name] for name in FEATURES], dim=1))


def hide_warnings_of_others() -> None:
    """Hides what TorchRec's planner and torch.fx say of each other: no user can act on it."""
    warnings.filterwarnings("ignore", "HeuristicalStorageReservation is known", FutureWarning)
    for name in (
        "torchrec.distributed.planner.types",
        "torchrec.distributed.planner.storage_reservations",
        "torch.fx._symbolic_trace",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_batch(step: int, samples: int = 64) -> Batch:
    """Returns one batch of this rank, one id per sample and feature."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    count = samples * len(FEATURES)
    ids = KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.randint(0, ROWS, (count,), generator=generator),
        lengths=torch.ones(count, dtype=torch.int32),
    )
    return Batch(dense_features=torch.empty(0), sparse_features=ids, labels=torch.empty(0))


def main() -> None:
    """Runs ten batches on every rank, up to two iterations apart."""
    hide_warnings_of_others()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # or load your weights into the model before it is sharded
    batches, outputs = (make_batch(step) for step in range(10)), []
    model = DistributedModelParallel(
        Model(),
        device=CPU,
        sharders=[BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=2))],
        init_data_parallel=False,  # inference needs no gradients of the dense part
    )
    pipeline = BoundedLagPipeline(model)
    while True:
        try:
            outputs.append(pipeline.progress(batches))  # in the order of the batches
        except StopIteration:
            break
    channels = bounded_lag_channels(model)
    report = gather_report([channel.stats() for channel in channels])  # on all ranks
    if dist.get_rank() == 0:
        print(f"{len(outputs)} outputs of shape {tuple(outputs[0].shape)}")
        for channel in channels:
            print(channel.name, channel.stats())
        print(report)  # who waited for whom, and which rank is the slowest
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
