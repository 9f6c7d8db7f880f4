"""The DLRM of emulated nodes against plain torch and against numpy, node by node."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.quantized import emulation
from benchmarks.quantized.dlrm import DLRM, LEARNING_RATE, Collectives, RowwiseAdagrad, Training
from benchmarks.quantized.planted_clicks import PlantedClicks
from tests.codecs import reference
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.datasets import capped_cardinalities

ROWS = capped_cardinalities(40)
BATCH = 16

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(count: int) -> list[Batch]:
    clicks = PlantedClicks(ROWS, seed=0).draw(count * BATCH, seed=1)
    parts = [clicks.rows(first, first + BATCH) for first in range(0, count * BATCH, BATCH)]
    return [
        (torch.from_numpy(c.dense), torch.from_numpy(c.ids), torch.from_numpy(c.labels))
        for c in parts
    ]


def plain_logits(model: DLRM, tables: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """The DLRM written out anew, with nothing of ours but its weights."""
    dense, ids, _ = batch
    bottom = dense
    for layer in model.layers[:4]:
        bottom = torch.relu(nn.functional.linear(bottom, layer.weight, layer.bias))
    vectors = [bottom] + [table[ids[:, place]] for place, table in enumerate(tables)]
    products = [
        (vectors[one] * vectors[other]).sum(1)
        for one in range(len(vectors))
        for other in range(one)
    ]
    top = torch.cat([bottom, torch.stack(products, 1)], 1)
    for layer in model.layers[4:6]:
        top = torch.relu(nn.functional.linear(top, layer.weight, layer.bias))
    return nn.functional.linear(top, model.layers[6].weight, model.layers[6].bias)[:, 0]


def plain_tables(model: DLRM) -> list[torch.Tensor]:
    return [table.clone().requires_grad_() for table in model.tables.split(ROWS)]


def test_full_precision_is_plain_training() -> None:
    ours = DLRM(ROWS, seed=4)
    theirs = copy.deepcopy(ours)
    tables = plain_tables(theirs)
    optimizer = torch.optim.SGD([*theirs.layers.parameters(), *tables], lr=LEARNING_RATE)
    training = Training(ours, Collectives())
    for batch in batches(4):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(
            plain_logits(theirs, tables, batch), batch[2]
        )
        loss.backward()
        optimizer.step()
        assert training.step(*batch) == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.tables, torch.cat(tables).detach(), rtol=1e-4, atol=1e-6)


def test_the_full_precision_ring_is_plain_training_but_for_the_order_of_sums() -> None:
    plain, ring = (
        Training(DLRM(ROWS, seed=4), how)
        for how in (Collectives(), Collectives(nodes=8, all_reduce=Codec.FP32))
    )
    for batch in batches(4):
        assert ring.step(*batch) == pytest.approx(plain.step(*batch), rel=1e-5)


def test_row_wise_adagrad_sums_the_gradients_of_a_row_first() -> None:
    tables = torch.ones(4, 2)
    update = RowwiseAdagrad(tables, 0.5)
    gradients = torch.tensor([[1.0, 2.0], [3.0, 0.0], [2.0, -2.0]])
    for _ in range(2):
        update(torch.tensor([3, 1, 3]), gradients)
    expected, summed = np.ones((4, 2)), {3: [3.0, 0.0], 1: [3.0, 0.0]}
    for row, gradient in summed.items():
        for steps in (1, 2):
            expected[row] -= 0.5 * np.array(gradient) / np.sqrt(steps * 4.5)
    np.testing.assert_allclose(tables.numpy(), expected, rtol=1e-6)


def quantized(rows: np.ndarray, bits: int) -> np.ndarray:
    """What numpy makes of rows that travel."""
    flat = np.ascontiguousarray(rows, dtype=np.float32).reshape(-1, rows.shape[-1])
    return reference.decode(reference.encode(flat, bits), flat.shape, bits).reshape(rows.shape)


def ring_of_numpy(of_nodes: list[np.ndarray], bits: int, errors: list[np.ndarray]) -> np.ndarray:
    """Algorithm 2, node by node: part k starts at node k - 1 and ends at node k - 2."""
    nodes = len(of_nodes)
    parts = [np.split(values, nodes) for values in of_nodes]
    lost = [np.split(error, nodes) for error in errors]
    sums = []
    for k in range(nodes):
        total = quantized(parts[k - 1][k], bits)
        for step in range(nodes - 1):
            node = (k + step) % nodes
            exact = parts[node][k] + total + lost[node][k]
            total = quantized(exact, bits)
            lost[node][k][:] = exact - total
        sums.append(total)
    return np.concatenate(sums)


def test_8_bits_are_what_numpy_makes_of_each_node() -> None:
    nodes = 4
    ours = DLRM(ROWS, seed=4)
    theirs = copy.deepcopy(ours)
    how = Collectives(nodes, Codec.UINT8, Codec.UINT8, Codec.UINT8, "ring", compensated=True)
    training = Training(ours, how)
    errors = {
        place: [np.zeros(layer.weight.shape, np.float32) for _ in range(nodes)]
        for place, layer in enumerate(theirs.layers)
    }
    for batch in batches(2):
        step_of_numpy(theirs, batch, nodes, errors)
        training.step(*batch)
        for one, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
            assert_close_but_for_codes(one, other)
        assert_close_but_for_codes(ours.tables, theirs.tables)
        # Differences of a code would grow from here on.
        theirs.load_state_dict(ours.state_dict())


def step_of_numpy(
    model: DLRM, batch: Batch, nodes: int, errors: dict[int, list[np.ndarray]]
) -> None:
    """One step of nodes that each go backward by themselves."""
    of_layers: dict[int, list[np.ndarray]] = {place: [] for place in errors}
    biases = [torch.zeros_like(layer.bias) for layer in model.layers]
    tables = model.tables.clone()
    rows = quantized(model.look_up(batch[1]).numpy(), 8)
    gradients = []
    for node in range(nodes):
        own = slice(node * BATCH // nodes, (node + 1) * BATCH // nodes)
        arrived = torch.from_numpy(rows[own]).requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(batch[0][own], arrived), batch[2][own]
        )
        parameters = [p for layer in model.layers for p in (layer.weight, layer.bias)]
        found = torch.autograd.grad(loss / nodes, [arrived, *parameters])
        gradients.append(quantized(found[0].numpy(), 8))
        for place in of_layers:
            of_layers[place].append(found[1 + 2 * place].numpy())
            biases[place] += found[2 + 2 * place]
    for sample, gradient in enumerate(np.concatenate(gradients)):
        for place, first in enumerate(model.first_rows.tolist()):
            tables[first + batch[1][sample, place]] -= torch.from_numpy(gradient[place])
    with torch.no_grad():
        model.tables.copy_(tables)
        for place, layer in enumerate(model.layers):
            evenly = layer.weight.shape[0] % nodes == 0
            summed = (
                ring_of_numpy(of_layers[place], 8, errors[place])
                if evenly
                else np.sum(of_layers[place], axis=0)
            )
            layer.weight -= torch.from_numpy(summed)
            layer.bias -= biases[place]


def assert_close_but_for_codes(one: torch.Tensor, other: torch.Tensor) -> None:
    """Sums in another order move a value across the middle between two codes now and then."""
    differences = (one.detach() - other.detach()).abs()
    assert differences.max() < 2e-3
    assert (differences > 1e-6).float().mean() < 0.01


def test_errors_are_carried_only_with_compensation(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    reduce = emulation.ring_all_reduce

    def noted(values: torch.Tensor, codec: Codec, error: torch.Tensor | None) -> torch.Tensor:
        errors.append(error)
        return reduce(values, codec, error)

    monkeypatch.setattr(emulation, "ring_all_reduce", noted)
    batch = batches(1)[0]
    for compensated in (False, True):
        how = Collectives(8, all_reduce=Codec.UINT2, compensated=compensated)
        Training(DLRM(ROWS, seed=4), how).step(*batch)
        # Of the seven layers, those with 512, 256 and 64 and 16 outputs; one has 1.
        assert [error is not None for error in errors] == 6 * [compensated]
        assert all(error.count_nonzero() for error in errors if compensated)
        errors.clear()
