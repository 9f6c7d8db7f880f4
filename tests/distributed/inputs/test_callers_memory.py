"""A batch's memory is the caller's again once its forward, or `progress`, has returned."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from tests.distributed import models
from tests.distributed.inputs.test_first_batches import close, mix_of
from tests.distributed.inputs.test_variable_batch import make_variable
from tests.processes import run
from tests.quant import models as quant
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BoundedLagPipeline, CodecConfig

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
STEPS = 7
Made = tuple[Any, Any, Callable[[int], KeyedJaggedTensor]]


def of_kind(name: str, sharding: str, **config: Any) -> Made:
    kind = KINDS[name]
    by = kind.bls_sharder(BLSConfig(deadline=60, **config))
    model = models.shard(kind, sharding, by)
    return model, models.SparseOnly(kind.module()), lambda seed: models.make_ids(kind, seed, 4)


def with_indices(sharding: str, **config: Any) -> Made:
    kind = models.EC
    module: Any = kind.module()
    tables = module.embedding_configs()
    module = EmbeddingCollection(tables=tables, need_indices=True)
    by = kind.bls_sharder(BLSConfig(deadline=60, **config))
    plan = models.make_plan(module, models.sharding_types(kind, sharding, 1), by)
    whole = models.SparseOnly(module)
    model = models.shard_model(whole, {"embeddings": plan}, [by])
    return model, whole, lambda seed: models.make_ids(kind, seed, 4)


def varying(name: str, **config: Any) -> Made:
    kind = KINDS[name]
    model, whole, _ = of_kind(name, "table_wise", **config)
    return model, whole, lambda seed: make_variable(kind, seed, [2, 1, 3, 2, 1], 4)


def quantized(kind: str, **config: Any) -> Made:
    model = quant.model_of(kind, ["int8"] * 4)
    whole = copy.deepcopy(model)
    by = quant.sharder_of(kind, BLSConfig(deadline=60, **config))
    return quant.shard(model, by, "row_wise"), whole, lambda seed: quant.make_ids(kind, seed, 4)


PATHS: dict[str, Callable[..., Made]] = {
    **{
        f"{name} {sharding}": lambda name=name, sharding=sharding, **config: of_kind(
            name, sharding, **config
        )
        for name in KINDS
        for sharding in ("table_wise", "row_wise", "column_wise", mix_of(KINDS[name]))
    },
    "ebc data_parallel": lambda **config: of_kind("ebc", "data_parallel", **config),
    "weighted data_parallel": lambda **config: of_kind("weighted", "data_parallel", **config),
    "ec unique": lambda **config: of_kind("ec", "mixed", codecs=CodecConfig(unique=True), **config),
    "ebc unique": lambda **config: of_kind(
        "ebc", "table_wise", codecs=CodecConfig(unique=True), **config
    ),
    "ec with ids": lambda **config: with_indices("mixed", **config),
    "ec varying": lambda **config: varying("ec", **config),
    "ebc varying": lambda **config: varying("ebc", **config),
    "quantized ec": lambda **config: quantized("ec", **config),
    "quantized ebc": lambda **config: quantized("ebc", **config),
    "quantized weighted": lambda **config: quantized("weighted", **config),
}
SHORT = ["ec table_wise", "ebc data_parallel", "ec with ids", "ebc varying", "quantized weighted"]
DIRECT = ["ec table_wise", "ec with ids", "weighted mixed", "ebc varying", "quantized ec"]


def spoil(ids: KeyedJaggedTensor) -> None:
    """Writes into a batch's tensors what no module accepts."""
    inverse = ids.inverse_indices_or_none()
    tensors = [ids.values(), ids.lengths(), ids.weights_or_none(), inverse and inverse[1]]
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(1_000_003)


def outputs_of(output: Any) -> dict[str, torch.Tensor]:
    """Returns an output as tensors by name, with the ids that it may have."""
    output = models.arrived(output)
    flat = models.flatten(output)
    if isinstance(output, dict):
        for name, jagged in output.items():
            if jagged.weights_or_none() is not None:
                flat[f"{name} ids"] = jagged.weights().to(torch.int64).clone()
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in flat.items()
    }


def whole_samples(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch of varying sizes with each sample in full."""
    names, rows = ids.inverse_indices()
    values, lengths = [], []
    for name, of_key in zip(names, rows, strict=True):
        jagged = ids[name].to_dense()
        for row in of_key.tolist():
            values.append(jagged[row])
            lengths.append(len(jagged[row]))
    return KeyedJaggedTensor(ids.keys(), torch.cat(values), lengths=torch.tensor(lengths))


def spoil_after_forwards(rank: int, path: str, lookup: str) -> None:
    model, whole, make = PATHS[path](lookup=lookup)
    with torch.no_grad():
        for step in range(4):
            ids = make(10 * step + rank)
            plain = whole_samples(ids) if ids.variable_stride_per_key() else ids
            expected = outputs_of(whole(models.Batch(plain)))
            output = model(models.Batch(ids))
            spoil(ids)
            close(outputs_of(output), expected)


@pytest.mark.parametrize("path", slow_but(SHORT, PATHS))
def test_after_a_forward(path: str) -> None:
    run(2, spoil_after_forwards, path, "exchange")


@pytest.mark.parametrize("path", DIRECT)
def test_after_a_forward_that_reads_directly(path: str) -> None:
    run(2, spoil_after_forwards, path, "direct")


def spoil_after_progress(rank: int, path: str, bound: int) -> None:
    model, whole, make = PATHS[path](lookup="exchange", bound=bound)
    expected = []
    with torch.no_grad():
        for step in range(STEPS):
            ids = make(10 * step + rank)
            plain = whole_samples(ids) if ids.variable_stride_per_key() else ids
            expected.append(outputs_of(whole(models.Batch(plain))))
    taken: list[KeyedJaggedTensor] = []

    def load() -> Iterator[models.Batch]:
        for step in range(STEPS):
            taken.append(make(10 * step + rank))
            yield models.Batch(taken[-1])

    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    source = load()
    for wanted in expected:
        output = pipeline.progress(source)
        for ids in taken:
            spoil(ids)
        close(outputs_of(output), wanted)


@pytest.mark.parametrize(
    ("path", "bound"),
    slow_but([(path, 2) for path in SHORT], [*product(PATHS, [2]), *product(SHORT, [0, 1])]),
)
def test_after_progress(path: str, bound: int) -> None:
    run(2, spoil_after_progress, path, bound)


class Two(nn.Module):
    def __init__(self, exchanged: nn.Module, read: nn.Module) -> None:
        super().__init__()
        self.exchanged, self.read = exchanged, read

    def forward(self, batch: models.Batch) -> tuple[Any, Any]:
        return self.exchanged(batch.ids), self.read(batch.ids)


def pipe_beside_direct_reads(rank: int) -> None:
    config = BLSConfig(deadline=60, bound=2, lookup="auto")
    kinds = {"exchanged": models.EBC, "read": models.EC}
    # A replicated table keeps its module from direct reads.
    types = {"exchanged": ["data_parallel", *["table_wise"] * 4], "read": ["table_wise"] * 5}
    modules = {name: kind.module() for name, kind in kinds.items()}
    sharders = {name: kind.bls_sharder(config) for name, kind in kinds.items()}
    plans = {
        name: models.make_plan(module, types[name], sharders[name])
        for name, module in modules.items()
    }
    model = models.shard_model(Two(**modules), plans, list(sharders.values()))
    whole = Two(**{name: kind.module() for name, kind in kinds.items()})
    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    taken = [models.make_ids(models.EC, 10 * step + rank, 4) for step in range(STEPS)]
    with torch.no_grad():
        expected = [[outputs_of(part) for part in whole(models.Batch(ids))] for ids in taken]
    posted: list[KeyedJaggedTensor] = []

    def load() -> Iterator[models.Batch]:
        for ids in taken:
            posted.append(ids)
            yield models.Batch(ids)

    source = load()
    for wanted in expected:
        output = pipeline.progress(source)
        for ids in posted:
            spoil(ids)
        for part, of_part in zip(output, wanted, strict=True):
            close(outputs_of(part), of_part)
    assert not model.module.exchanged.reads_directly and model.module.read.reads_directly


def test_after_progress_with_direct_reads_beside_exchanges() -> None:
    run(2, pipe_beside_direct_reads)
