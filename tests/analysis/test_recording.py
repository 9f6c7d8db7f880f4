"""What plain modules look up is recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import DataType

from tests.distributed import models
from torchrec_bls import record_lookups
from torchrec_bls.analysis.samples import SampledTable, Samples


def recorded(path: Path, model: nn.Module, batches: list[Any]) -> Samples:
    record_lookups(model, batches, path)
    return Samples(path)


def check(samples: Samples, module: Any, batches: list[KeyedJaggedTensor]) -> None:
    """Compares samples with lookups of each id."""
    pooled = isinstance(module, EmbeddingBagCollection)
    weights = module.state_dict()
    for table in samples.tables:
        kind = "embedding_bags" if pooled else "embeddings"
        rows = weights[f"{kind}.{table.name}.weight"]
        for lookups, batch in zip(samples.of(table), batches, strict=True):
            for lookup, feature in zip(lookups, table.features, strict=True):
                ids = batch[feature]
                assert lookup.ids.tolist() == ids.values().tolist()
                assert lookup.lengths.tolist() == ids.lengths().tolist()
                if not pooled:
                    assert np.array_equal(lookup.rows, rows[ids.values()].numpy())
                elif not table.weighted and table.name in ("t0", "t2", "t4"):  # sums
                    bags = rows[ids.values()].split(ids.lengths().tolist())
                    sums = torch.stack([bag.sum(0) for bag in bags])
                    assert np.allclose(lookup.rows, sums.numpy(), atol=1e-5)


KINDS = [models.EC, models.EBC, models.WEIGHTED]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_lookups_of_plain_modules(kind: models.Kind, tmp_path: Path) -> None:
    module: Any = kind.module()
    batches = [models.make_ids(kind, seed, samples) for seed, samples in enumerate((5, 3))]
    samples = recorded(tmp_path, models.SparseOnly(module), [models.Batch(ids) for ids in batches])
    check(samples, module, batches)
    assert samples.tables[3] == SampledTable(
        name="t3",
        rows=64,
        dim=8 if kind.name == "ec" else 16,
        pooled=kind.name != "ec",
        weighted=kind.name == "weighted",
        data_type="FP32",
        features=("f3", "f0"),
    )
    for lookups, ids in zip(samples.of(samples.tables[3]), batches, strict=True):
        output = models.flatten(module(ids))
        if kind.name == "ec":
            assert np.array_equal(lookups[1].rows, output["f0@t3 values"].numpy())
        else:
            (values,) = output.values()
            assert np.array_equal(lookups[0].rows, values[:, 32:48].numpy())
            assert np.array_equal(lookups[1].rows, values[:, 48:64].numpy())


class Both(nn.Module):
    """Calls both kinds of collections, one only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="bags",
                    num_embeddings=9,
                    embedding_dim=4,
                    feature_names=["g"],
                    data_type=DataType.FP16,
                )
            ]
        )
        self.ids = models.Kind("ec", tables=1).module()
        self.norm = nn.BatchNorm1d(4)
        self.modes: list[bool] = []

    def forward(self, batch: KeyedJaggedTensor) -> None:
        self.modes.append(self.training or torch.is_grad_enabled())
        if "g" in batch.keys():  # noqa: SIM118
            self.norm(self.bags(batch).values().float())
        if "f0" in batch.keys():  # noqa: SIM118
            self.ids(features=batch)


def ids_of(*features: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        list(features), torch.tensor([1, 2] * len(features)), torch.tensor([1, 1] * len(features))
    )


def test_models_stay_as_they_were(tmp_path: Path) -> None:
    model = Both()
    model.norm.eval()
    model.bags.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = recorded(tmp_path, model, [ids_of("g", "f0"), ids_of("f0"), ids_of("g")])
    assert model.modes == [False] * 3
    assert model.training and model.bags.training and not model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    # A collection that was not called for a batch has nothing of it.
    bags, ids = samples.tables
    assert [len(lookups[0].rows) for lookups in samples.of(bags)] == [2, 0, 2]
    assert [len(lookups[0].rows) for lookups in samples.of(ids)] == [2, 2, 0]
    assert (bags.data_type, ids.data_type) == ("FP16", "FP32")


def test_a_rank_may_take_part_and_record_nothing() -> None:
    model = Both()
    record_lookups(model, [ids_of("g", "f0")], None)
    assert len(model.modes) == 1


def test_collections_that_were_never_called_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"\['bags'\] were called for no batch, so that their tab"):
        recorded(tmp_path, Both(), [ids_of("f0")])
    with pytest.raises(ValueError, match=r"\['bags', 'ids'\] were called for no batch: record a"):
        record_lookups(Both(), [ids_of("h")], None)


class Calls(nn.Module):
    """Calls its collection as it is told."""

    def __init__(self, calling: Callable[[Any, KeyedJaggedTensor], object]) -> None:
        super().__init__()
        self.embeddings = models.Kind("ec", tables=1).module()
        self._calling = calling

    def forward(self, batch: KeyedJaggedTensor) -> None:
        self._calling(self.embeddings, batch)


class AnyInput(EmbeddingCollection):
    """Takes whatever it is called with."""

    def forward(self, features: object) -> object:
        return features


def varying() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f0", "f1"], torch.tensor([[0, 1], [0, 0]])),
    )


@pytest.mark.parametrize(
    ("model", "batches", "said"),
    [
        (nn.Linear(1, 1), [], "Linear has no EmbeddingBagCollection and no EmbeddingCollection"),
        (
            nn.ModuleList([models.EC.module(), models.EBC.module()]),
            [],
            r"\['t0', 't1', 't2', 't3', 't4'\] are names of several tables, but bounds are",
        ),
        (Both(), [], "there are no batches to record"),
        (
            Calls(lambda module, ids: (module(ids), module(ids))),
            [ids_of("f0")],
            "'embeddings' was called twice for one batch",
        ),
        (
            AnyInput(tables=models.Kind("ec", 1).module().embedding_configs()),
            [torch.zeros(1)],
            "'AnyInput' was called with a Tensor, not a KeyedJaggedTensor",
        ),
        (
            AnyInput(tables=models.Kind("ec", 1).module().embedding_configs()),
            [varying()],
            "'AnyInput' was called with a batch whose size varies by key, which is not recorded",
        ),
    ],
)
def test_what_cannot_be_recorded(
    model: nn.Module, batches: list[Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        record_lookups(model, batches, tmp_path / "samples")
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(FileNotFoundError, match="or its recording was cut short"):
        Samples(tmp_path / "samples")


def test_samples_are_not_written_over(tmp_path: Path) -> None:
    batches = [ids_of("g", "f0")]
    record_lookups(Both(), batches, str(tmp_path))
    with pytest.raises(FileExistsError, match="is not empty: name another folder"):
        record_lookups(Both(), batches, tmp_path)
