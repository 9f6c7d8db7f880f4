"""Quantized all-reduce of gradients in DistributedDataParallel."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from benchmarks.quantized import emulation
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.overlap.quantized_hook import (
    QuantizedAllReduceState,
    quantized_all_reduce_hook,
)

COLUMNS = 256


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 3))


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = torch.randn(8, 7, generator=generator)
    return samples, samples[:, :3] - samples[:, 3:6]


class Training:
    """A model in DDP with the hook, and plain SGD."""

    def __init__(self, **arguments: Any) -> None:
        self.model = make_model()
        # Small buckets, of which DDP makes others after the first step.
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.001)
        self.state = QuantizedAllReduceState(self.ddp, **arguments)
        self.ddp.register_comm_hook(self.state, quantized_all_reduce_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, rank: int, step: int) -> float:
        samples, labels = batch_of(rank, step)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.ddp(samples), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def weights(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]


class Expected:
    """What the emulation makes of the gradients of all ranks."""

    def __init__(self, world: int, codec: Codec) -> None:
        self.model = make_model()
        self.world = world
        self.codec = codec
        self.errors = [
            {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
            for _ in range(world)
        ]

    def gradients(self, step: int, order: list[str]) -> torch.Tensor:
        """Returns the averages of a bucket that has the parameters in `order`."""
        flat = torch.stack(
            [self._flat(self._gradients(rank, step), order) for rank in range(self.world)]
        )
        errors = torch.stack([self._flat(errors, order) for errors in self.errors])
        rows = self._fill(errors)
        summed = emulation.ring_all_reduce(self._fill(flat / self.world), self.codec, rows)
        for rank, errors_of_rank in enumerate(self.errors):
            first = 0
            for name in order:
                last = first + errors_of_rank[name].numel()
                errors_of_rank[name].view(-1)[:] = rows[rank].view(-1)[first:last]
                first = last
        return summed.view(-1)[: flat.shape[1]]

    def _gradients(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        samples, labels = batch_of(rank, step)
        loss = nn.functional.mse_loss(self.model(samples), labels)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def _flat(self, by_name: dict[str, torch.Tensor], order: list[str]) -> torch.Tensor:
        return torch.cat([by_name[name].reshape(-1) for name in order])

    def _fill(self, flat: torch.Tensor) -> torch.Tensor:
        missing = -flat.shape[1] % COLUMNS
        filled = torch.cat([flat, flat[:, -1:].repeat(1, missing)], 1)
        return filled.view(self.world, -1, COLUMNS)


def average_as_emulated(rank: int) -> None:
    model = make_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    ddp = DistributedDataParallel(model)  # so small a model has one bucket
    state = QuantizedAllReduceState(ddp, codec=Codec.UINT4)
    orders = []

    def hook(
        state: QuantizedAllReduceState, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        orders.append([names[parameter] for parameter in bucket.parameters()])
        return quantized_all_reduce_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    expected = Expected(3, Codec.UINT4)
    for step in range(4):
        model.zero_grad()
        samples, labels = batch_of(rank, step)
        nn.functional.mse_loss(ddp(samples), labels).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        averages = expected.gradients(step, orders[-1])
        flat = torch.cat([found[name].reshape(-1) for name in orders[-1]])
        torch.testing.assert_close(flat, averages, rtol=0, atol=0)
    assert len(orders) == 4


def test_gradients_are_those_of_the_emulation() -> None:
    run(3, average_as_emulated)


def train(rank: int, world: int, arguments: dict[str, Any]) -> None:
    training = Training(**arguments)
    losses = [training.step(rank, step % 4) for step in range(40)]
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, training.weights())
    assert all(weights == gathered[0] for weights in gathered)
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        *slow_but(
            [{"codec": Codec.UINT4, "algorithm": "recursive_doubling", "group_size": 2}],
            [
                {"codec": Codec.UINT4},
                {"codec": Codec.UINT8, "error_compensation": False},
                {"codec": Codec.UINT4, "algorithm": "recursive_doubling", "group_size": 2},
            ],
        ),
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())) or "defaults",
)
def test_training_goes_on_with_the_same_weights_on_all_ranks(arguments: dict[str, Any]) -> None:
    run(4, train, 4, arguments)


def stop_and_go_on(rank: int) -> None:
    undisturbed = Training(codec=Codec.UINT4)
    for step in range(6):
        undisturbed.step(rank, step)
    first = Training(codec=Codec.UINT4)
    for step in range(3):
        first.step(rank, step)
    checkpoint = (first.model.state_dict(), first.state.state_dict())
    assert all(error.count_nonzero() > 0 for error in checkpoint[1]["errors"].values())
    second = Training(codec=Codec.UINT4)
    # DDP arranges the buckets of a new module in its first step: now they are the old one's.
    second.step(rank, 7)
    second.model.load_state_dict(checkpoint[0])
    second.state.load_state_dict(checkpoint[1])
    assert checkpoint[1]["errors"].keys() == dict(second.model.named_parameters()).keys()
    torch.testing.assert_close(second.state.state_dict(), checkpoint[1], rtol=0, atol=0)
    for step in range(3, 6):
        second.step(rank, step)
    assert second.weights() == undisturbed.weights()


@pytest.mark.smoke
def test_errors_are_saved_and_restored() -> None:
    run(2, stop_and_go_on)


def load_other_states(rank: int) -> None:
    training = Training(codec=Codec.UINT4)
    training.step(rank, 0)
    saved = training.state.state_dict()
    with pytest.raises(ValueError, match="error_compensation is off"):
        Training(error_compensation=False).state.load_state_dict(saved)
    saved["errors"]["0.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"shape \(2, 2\) for parameter '0.weight', but the model"):
        training.state.load_state_dict(saved)


def test_states_of_another_model_are_refused() -> None:
    run(2, load_other_states)


def reduce_in_one_group(rank: int) -> None:
    arguments = {"codec": Codec.UINT4, "algorithm": "recursive_doubling"}
    with pytest.raises(ValueError, match="all 2 ranks are one group"):
        Training(**arguments)
    training = Training(**arguments, error_compensation=False)
    training.step(rank, 0)


def test_compensation_without_effect_is_refused() -> None:
    run(2, reduce_in_one_group)
