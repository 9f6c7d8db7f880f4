# first_model.py
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    bounded_lag_channels,
)
from torchrec_bls.datasets import CATEGORICAL_NAMES, DENSE_FEATURES, SyntheticDataset
from torchrec_bls.observe import gather_report

CPU, ROWS, DIM = torch.device("cpu"), [1000] * len(CATEGORICAL_NAMES), 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"table_{name}",
                feature_names=[name],
                num_embeddings=rows,
                embedding_dim=DIM,
            )
            for name, rows in zip(CATEGORICAL_NAMES, ROWS)
        ]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=tables, device=CPU),
            dense_in_features=DENSE_FEATURES,
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[32, 1],
        )

    def forward(self, batch):
        return self.dlrm(batch.dense_features, batch.sparse_features)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)


def batches(steps=20):
    return SyntheticDataset(rows_per_table=ROWS, batch_size=64, steps=steps, seed=1, rank=rank)
def sharded(bound):
    torch.manual_seed(0)  # all ranks begin with the same weights; load yours here
    return DistributedModelParallel(
        Model(),
        device=CPU,
        sharders=[BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=bound))],
        init_data_parallel=False,  # inference needs no gradients of the dense part
    ).eval()
synchronous = sharded(bound=0)
with torch.no_grad():
    expected = [synchronous(batch) for batch in batches()]
lagging = sharded(bound=2)
pipeline = BoundedLagPipeline(lagging)
source, outputs = iter(batches()), []
while True:
    try:
        outputs.append(pipeline.progress(source))
    except StopIteration:  # all ranks have answered their last batch
        break
assert len(outputs) == len(expected) == 20
assert all(torch.equal(output, logits) for output, logits in zip(outputs, expected))
channels = bounded_lag_channels(lagging)
report = gather_report([channel.stats() for channel in channels])  # on all ranks
if rank == 0:
    print(f"{len(outputs)} outputs, all as expected")
    print("channels:", ", ".join(channel.name.split(".")[-1] for channel in channels))
    print("lag seen by rank 0:", len(report.lag_histogram[0]) - 1, "at most")
dist.destroy_process_group()
