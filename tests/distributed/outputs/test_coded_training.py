"""A model trained by 4 ranks with embeddings in 4 bits and gradients in 2.

Its losses are those of one process that rounds as the ranks do, with the numpy reference.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.codecs import reference
from tests.distributed import models
from tests.processes import run
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig

RANKS, TABLES, ROWS, DIM, BATCH, STEPS = 4, 4, 50, 16, 64, 25
LEARNING_RATE = 3.0
# TorchRec divides the gradients of embeddings by the ranks, as if all of them had all samples.
FORWARD_BITS, BACKWARD_BITS = 4, 2


def tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=ROWS, embedding_dim=DIM, name=f"t{i}", feature_names=[f"f{i}"]
            )
            for i in range(TABLES)
        ]
    )


def head() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(TABLES * DIM, 32), nn.ReLU(), nn.Linear(32, 1))


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids [tables, batch] and labels that depend on them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(ROWS, (TABLES, BATCH), generator=generator)
    return ids, ((ids % 2).sum(0) >= TABLES / 2).float()


def loss_of(model: nn.Module, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(values).squeeze(1), labels)


def train(rank: int) -> list[float]:
    """Returns the mean loss of the ranks in each step."""
    sharder = BLSEmbeddingBagCollectionSharder(
        config=BLSConfig(codecs=CodecConfig(forward="uint4", backward="uint2")),
        fused_params={"learning_rate": LEARNING_RATE},
    )
    module = tables()
    plan = models.make_plan(module, ["table_wise"] * TABLES, sharder)
    embeddings = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
    model = head()
    losses = []
    for step in range(STEPS):
        ids, labels = samples(rank, step)
        keys = [f"f{i}" for i in range(TABLES)]
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int32)
        output = models.arrived(
            embeddings(models.Batch(KeyedJaggedTensor(keys, ids.flatten(), None, lengths)))
        )
        columns = dict(
            zip(output.keys(), output.values().split(output.length_per_key(), dim=1), strict=True)
        )
        loss = loss_of(model, torch.cat([columns[key] for key in keys], dim=1), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= LEARNING_RATE / RANKS * parameter.grad
                parameter.grad = None
            mean = loss.detach().clone()
            dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    return losses


def rounded(values: torch.Tensor, bits: int | None) -> torch.Tensor:
    """Rounds [batch, tables x dim] as the codecs do: the columns of each table by themselves."""
    if bits is None:
        return values
    rows = values.detach().numpy().reshape(-1, DIM)
    decoded = reference.decode(reference.encode(rows, bits), rows.shape, bits)
    return torch.from_numpy(decoded).view(values.shape)


def emulate(forward: int | None, backward: int | None) -> list[float]:
    """The same in one process, where a sample's values pass between ranks in so many bits."""
    weights = torch.stack([table.weight.detach() for table in tables().embedding_bags.values()])
    model = head()
    losses = []
    for step in range(STEPS):
        total, changes = 0.0, torch.zeros_like(weights)
        for rank in range(RANKS):
            ids, labels = samples(rank, step)
            looked_up = torch.cat([weights[i][ids[i]] for i in range(TABLES)], dim=1)
            values = rounded(looked_up, forward).requires_grad_()
            loss = loss_of(model, values, labels)
            loss.backward()
            assert values.grad is not None
            gradient = rounded(values.grad, backward) / RANKS
            for i in range(TABLES):
                changes[i].index_add_(0, ids[i], gradient[:, i * DIM : (i + 1) * DIM])
            total += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= LEARNING_RATE / RANKS * parameter.grad
                parameter.grad = None
        weights -= LEARNING_RATE * changes
        losses.append(total / RANKS)
    return losses


# tests/quantized/test_sharded.py trains the DLRM of the study in as few bits.
@pytest.mark.slow
def test_training_in_few_bits_follows_its_emulation() -> None:
    losses = run(RANKS, train)[0]
    emulated = emulate(FORWARD_BITS, BACKWARD_BITS)
    # Sums in another order may round a value to the next step of a grid here and there.
    np.testing.assert_allclose(losses, emulated, rtol=1e-3)
    assert losses[-1] < losses[0] - 0.05
    exact = np.array(emulate(None, None))
    assert np.abs(exact / losses - 1).max() > 4e-3, "the rounding could not be told from none"
