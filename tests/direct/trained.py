"""A model that two ranks train with TorchRec or this package, and whose rows are tracked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)

from tests.distributed import models
from torchrec_bls import BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder

SHARDERS = {
    "torchrec": (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder),
    "bls": (BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder),
}
# Rows of each table, by the way that it is sharded. Those of two ranks are not the same number.
ROWS = {"tw": 41, "rw": 57, "cw": 64, "twrw": 33, "dp": 19}
DIM = 8
WAYS: dict[str, Callable[[int], Any]] = {
    "tw": lambda ranks: table_wise(rank=ranks - 1),
    "rw": lambda _: row_wise(),
    "cw": lambda ranks: column_wise(ranks=[ranks - 1, 0]),
    "twrw": lambda _: table_row_wise(host_index=0),
    "dp": lambda _: data_parallel(),
}
# TorchRec shards no sequences by tables and rows, and FBGEMM's dense kernel mishandles them.
BAGS, SEQUENCES = list(ROWS), ["tw", "rw", "cw"]
# By its optimizer, all rows change at each step.
REPLICATED = "bags.embedding_bags.b_dp.weight"
SAMPLES = 6


class Model(nn.Module):
    """Looks a batch up in both modules. A table with two features is among the bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags: Any = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"b_{way}",
                    num_embeddings=ROWS[way],
                    embedding_dim=DIM,
                    feature_names=[f"f_{way}"] + ["f_more"] * (way == "rw"),
                )
                for way in BAGS
            ]
        )
        self.rows: Any = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"r_{way}",
                    num_embeddings=ROWS[way],
                    embedding_dim=DIM,
                    feature_names=[f"g_{way}"],
                )
                for way in SEQUENCES
            ]
        )
        self.dense = nn.Linear(DIM * (len(BAGS) + 1), 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        bags, rows = self.bags(ids).to_dict(), models.arrived(self.rows(ids))
        # By name: the order depends on the plan.
        pooled = {name: bags[name] for name in sorted(bags)}
        logits = self.dense(torch.cat(list(pooled.values()), dim=1))
        values = {name: rows[name].values() for name in sorted(rows)}
        return {**pooled, **values, "logits": logits}


def ids_of(seed: int) -> KeyedJaggedTensor:
    """Draws up to one id for a bag, whose sum has no rounding then, and up to three for a
    sequence."""
    generator = torch.Generator().manual_seed(seed)
    features = {f"f_{way}": ROWS[way] for way in BAGS} | {"f_more": ROWS["rw"]}
    features |= {f"g_{way}": ROWS[way] for way in SEQUENCES}
    lengths, values = [], []
    for name, rows in features.items():
        most = 1 if name.startswith("f") else 3
        lengths.append(torch.randint(most + 1, (SAMPLES,), generator=generator, dtype=torch.int32))
        # Few ids, so that rows of most tables stay as they are.
        drawn = torch.randint(rows // 4, (int(lengths[-1].sum()),), generator=generator)
        values.append(drawn * 3 % rows)
    return KeyedJaggedTensor(list(features), torch.cat(values), lengths=torch.cat(lengths))


def sharded(sharders: str) -> DistributedModelParallel:
    """Returns the model with the weights of Model()."""
    model = Model()
    of_bags, of_rows = (kind(fused_params=dict(models.SGD)) for kind in SHARDERS[sharders])
    plans = {}
    for name, prefix, ways, sharder in (
        ("bags", "b", BAGS, of_bags),
        ("rows", "r", SEQUENCES, of_rows),
    ):
        plan = construct_module_sharding_plan(
            getattr(model, name),
            {f"{prefix}_{way}": WAYS[way](dist.get_world_size()) for way in ways},
            sharder=sharder,
            world_size=dist.get_world_size(),
            local_size=dist.get_world_size(),
            device_type="cpu",
        )
        for way in ways:
            kernel = "dense" if way == "dp" else "fused"
            plan[f"{prefix}_{way}"].compute_kernel = kernel
        plans[name] = plan
    models.set_nodes(1)
    return models.shard_model(model, plans, [of_bags, of_rows])


class Training:
    """Trains the model on this rank, one of two.

    Args:
        rank: this rank.
        sharders: key of SHARDERS.
    """

    def __init__(self, rank: int, sharders: str) -> None:
        self.model = sharded(sharders)
        self._rank = rank
        self._step = 0
        not_fused = [
            parameter
            for name, parameter in self.model.named_parameters()
            if "dense" in name or "_dp" in name
        ]
        # With momentum all rows change.
        self._optimizer = torch.optim.Adam(not_fused, lr=0.01)

    def batch_of(self, step: int, rank: int) -> KeyedJaggedTensor:
        return ids_of(100 * step + rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step += 1
            self._optimizer.zero_grad()
            outputs = self.model(self.batch_of(self._step, self._rank))
            loss = sum((output * output).sum() for output in outputs.values())
            assert isinstance(loss, torch.Tensor)
            (loss + outputs["logits"].sum()).backward()
            self._optimizer.step()
            self.model.module.steps += 1

    def ids_between(self, first: int, last: int) -> dict[str, set[int]]:
        """Returns the ids of all ranks after step `first` until step `last`, by table."""
        seen: dict[str, set[int]] = {}
        for step in range(first + 1, last + 1):
            for rank in range(dist.get_world_size()):
                for name, ids in self.batch_of(step, rank).to_dict().items():
                    way = "rw" if name == "f_more" else name[2:]
                    table = (
                        f"bags.embedding_bags.b_{way}.weight"
                        if name[0] == "f"
                        else f"rows.embeddings.r_{way}.weight"
                    )
                    seen.setdefault(table, set()).update(ids.values().tolist())
        return seen

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns all weights, whole; collective."""
        state = self.model.state_dict()
        own = models.local_shards(self.model)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        whole = {name: value.clone() for name, value in Model().state_dict().items()}
        for name, value in state.items():
            if not hasattr(value, "local_shards"):
                whole[name] = value.detach().clone()
        for shards in of_ranks:
            for name, (rows, columns, tensor) in shards.items():
                whole[name.partition(" ")[0]][rows, columns] = tensor
        return whole


# What Nodes need.


def batches_of(rank: int, count: int = 4) -> list[KeyedJaggedTensor]:
    return [ids_of(7000 + 10 * rank + number) for number in range(count)]


def bare_model() -> nn.Module:
    """Returns the model with no memory for tables and other dense weights."""
    with torch.device("meta"):
        model = Model()
    model.dense = nn.Linear(DIM * (len(BAGS) + 1), 1)
    model.steps = torch.full((), -1)
    return model


def number_of(version: str) -> int:
    """Returns the number of a version: of "step-7@0a0b0c0d" and "step-7.pt@0a0b0c0d" it is 7."""
    return int(version.partition("@")[0].removesuffix(".pt").removeprefix("step-"))


class Expected:
    """What the unsharded model gives for a batch in each version.

    Attributes:
        folder: folder with the weights of each version, once they are known.
    """

    def __init__(self, batches: Sequence[KeyedJaggedTensor]) -> None:
        self.folder: Path
        self._batches = batches
        self._known: dict[int, list[dict[str, torch.Tensor]]] = {}

    def of(self, number: int, batch: int) -> dict[str, torch.Tensor]:
        if number not in self._known:
            model = Model()
            model.load_state_dict(torch.load(self.folder / f"step-{number}.pt"))
            with torch.no_grad():
                self._known[number] = [model(ids) for ids in self._batches]
        return self._known[number][batch]
