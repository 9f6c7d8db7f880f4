"""Forwards in CUDA graphs, against unsharded models.

    TRITON_INTERPRET=1 python -m tests.gpu.captured CHECK...

See sharded.py. The fake GPU runs a forward anew for each replay, and lets its lookups do no more
than the launches that a graph has.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from tests.direct import nodes, served
from tests.direct.nodes import Node, NodeFailedError, until
from tests.direct.row_versions import go_on
from tests.direct.test_keeper import KEEPER
from tests.distributed import models
from tests.gpu.attached import REFRESHED, fake, go_on_soon, keeper_and
from tests.gpu.ids import BAD, on_gpu, without_waits
from tests.gpu.sharded import DIRECT, GPU, IS_FAKE, gpu_here, make
from tests.processes import run
from tests.quant import models as quant_models
from torchrec_bls import CapturedForward, bounded_lag_modules, publish, version_of
from torchrec_bls.direct.serving.served_model import ServedModel

SAMPLES = 6
# Of each key, the numbers of ids of its bags in some order.
SIZES = [[0, 1, 2, 3, 1, 1], [1] * 6, [0] * 6, [5, 0, 0, 2, 0, 0], [2, 2, 2, 1, 1, 0]]


class Scores(served.Model):
    """Looks a batch up in both modules, and runs a dense layer over numbers."""

    def forward(  # type: ignore[override]
        self, ids: KeyedJaggedTensor, numbers: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found = served.flatten({"bags": self.bags(ids), "rows": self.rows(ids)})
        return found | {"dense": self.dense(numbers)}


def request(seed: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Returns arguments of a forward, of the same shapes for all seeds."""
    random = torch.Generator().manual_seed(seed)
    order = [torch.randperm(SAMPLES, generator=random) for _ in SIZES]
    lengths = [torch.tensor(sizes)[by] for sizes, by in zip(SIZES, order, strict=True)]
    ids = torch.randint(min(models.ROWS), (sum(map(sum, SIZES)),), generator=random)
    batch = KeyedJaggedTensor(models.FEATURES, ids, lengths=torch.cat(lengths))
    return batch, torch.randint(9, (SAMPLES, 1), generator=random).float()


def moved(arguments: tuple[KeyedJaggedTensor, torch.Tensor], gpu: Any) -> Any:
    batch, numbers = arguments
    batch.length_per_key()  # which `to` keeps
    if not IS_FAKE:
        return batch.to(GPU), numbers.to(GPU)
    own = gpu.empty_like(numbers).copy_(numbers)
    return on_gpu(batch, gpu, hides=False), own


def expected_of(number: int, arguments: Any) -> dict[str, torch.Tensor]:
    model = Scores()
    model.load_state_dict(served.weights_of(number))
    with torch.no_grad():
        found: dict[str, torch.Tensor] = model(*arguments)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    models.assert_same_bits({name: each.cpu() for name, each in found.items()}, expected)


def sharded() -> Any:
    model = served.sharded(DIRECT, GPU, Scores)
    if not IS_FAKE:
        model.module.dense.to(GPU)
    return model


def replay(rank: int) -> None:
    gpu = gpu_here()
    model = sharded()
    with torch.no_grad():
        model(*moved(request(0), gpu))  # the ranks meet
    captured = CapturedForward(model, *moved(request(1), gpu))
    other = CapturedForward(model, *moved(request(2), gpu))
    for number in (1, 2, 3):
        if number > 1:
            publish(model, served.weights_of(number), version=str(number)).wait(30.0)
        for seed in range(3):
            arguments = request(100 * number + 10 * rank + seed)
            on_device = moved(arguments, gpu)
            with without_waits(gpu):
                found = (captured, other)[seed % 2](*on_device)
            assert_same(found, expected_of(number, arguments))
            assert served.number_of(version_of(model)) == number
        if IS_FAKE:  # kernels of the version before had read dense weights
            assert gpu.cuda.trace.count("settle") == 2 * (number - 1)
        if number == 2:  # forwards that nobody captured go on beside them
            with torch.no_grad():
                assert_same(model(*on_device), expected_of(number, arguments))
    for module in bounded_lag_modules(model).values():
        module.wait_checked()
    dist.barrier()
    del captured, other, model, module
    gc.collect()


def replays() -> None:
    run(2, replay, deadline=300)


def tell_late(rank: int) -> None:
    gpu = gpu_here()
    model = sharded()
    with torch.no_grad():
        model(*moved(request(0), gpu))
    captured = CapturedForward(model, *moved(request(1), gpu))
    batch, numbers = request(2)
    bad, _ = request(2)
    bad.values()[3] = BAD
    if IS_FAKE:
        gpu.cuda.is_busy = True
    found = captured(*moved((bad, numbers), gpu))
    assert any(each.isnan().any() for name, each in found.items() if name != "dense")
    good = captured(*moved((batch, numbers), gpu))  # its report is another one
    assert not any(each.isnan().any() for each in good.values())
    if IS_FAKE:
        gpu.cuda.is_busy = False
    else:
        torch.cuda.synchronize()
    message = rf"looked up in version '\(first forward\)': id {BAD} of feature 'f0', at position 3"
    for _ in bounded_lag_modules(model):  # each tells it once
        with pytest.raises(ValueError, match=message):
            captured(*moved((batch, numbers), gpu))
    assert_same(captured(*moved((batch, numbers), gpu)), expected_of(1, (batch, numbers)))
    assert all(module.refused_batches == 1 for module in bounded_lag_modules(model).values())


def late_errors_of_replays() -> None:
    run(2, tell_late, deadline=120)


def refuse(rank: int) -> None:
    gpu = gpu_here()
    model = sharded()
    batch, numbers = on_device = moved(request(0), gpu)
    with torch.no_grad():
        expected = {name: each.clone() for name, each in model(*on_device).items()}
    with pytest.raises(ValueError, match=r"input 1 has a str: a CUDA graph takes tensors"):
        CapturedForward(model, batch, "numbers")
    if IS_FAKE:
        with pytest.raises(ValueError, match=r"input 0 has a tensor on cpu, and not on the GPU"):
            CapturedForward(model, request(0)[0], numbers)
    captured = CapturedForward(model, *on_device)
    with pytest.raises(ValueError, match=r"the forward was captured with inputs"):
        captured(batch)
    with pytest.raises(ValueError, match=r"input 1 has \[4, 1\] numbers of .*\[6, 1\]"):
        captured(batch, moved((request(0)[0], torch.ones(4, 1)), gpu)[1])
    with pytest.raises(ValueError, match=r"input 0 has another type or other keys"):
        captured(numbers, numbers)
    keys = KeyedJaggedTensor(models.FEATURES[::-1], batch.values(), lengths=batch.lengths())
    with pytest.raises(ValueError, match=r"input 0 has another type or other keys"):
        captured(keys, numbers)
    # As many ids, but not of each key: rows of sequences would be those of other keys.
    lengths = request(0)[0].lengths()
    lengths[0] += 1
    lengths[-1:] -= lengths[-1:].clamp(max=1)
    lengths[lengths.nonzero()[-1]] -= int(lengths.sum()) - batch.values().numel()
    shifted = KeyedJaggedTensor(models.FEATURES, request(0)[0].values(), lengths=lengths)
    with pytest.raises(ValueError, match=r"input 0 has \[9, 6, 0, .* rows of an EmbeddingColl"):
        captured(*moved((shifted, request(0)[1]), gpu))
    moved_weight = model.module.dense.weight
    moved_weight.data = moved_weight.data.clone()
    publish(model, served.weights_of(1), version="1").wait(30.0)
    with pytest.raises(ValueError, match=r"\['dense.weight'\] have other memory than when"):
        captured(*on_device)
    assert_same(CapturedForward(model, *on_device)(*on_device), expected)
    # Models whose lookups no graph can have.
    by_the_cpu = served.sharded(DIRECT)
    with torch.no_grad():
        by_the_cpu(request(0)[0])
    with pytest.raises(ValueError, match=r"takes a model whose tables a GPU reads: shard with"):
        CapturedForward(by_the_cpu, *on_device)


class _OfIds(torch.nn.Module):
    """A model of lookups alone, whose input is a KeyedJaggedTensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return models.flatten(models.arrived(self.model(models.Batch(ids))))


def replay_stored_rows(rank: int, kind: str, types: list[str]) -> None:
    gpu = gpu_here()
    model = quant_models.model_of(kind, types, torch.float32)
    unsharded = copy.deepcopy(model)
    sharder = quant_models.sharder_of(kind, DIRECT)
    by_gpu = _OfIds(quant_models.shard(model, sharder, "mixed", GPU))
    batch = quant_models.make_ids(kind, 1, 5)
    batch.length_per_key()
    first = on_gpu(batch, gpu, hides=False)
    with torch.no_grad():
        by_gpu(first)
    captured = CapturedForward(by_gpu, first)
    for seed in range(3):
        random = torch.Generator().manual_seed(100 * rank + seed)
        ids = torch.randint(min(quant_models.ROWS), batch.values().shape, generator=random)
        given = KeyedJaggedTensor(batch.keys(), ids, batch.weights_or_none(), batch.lengths())
        given.length_per_key()
        with torch.no_grad():
            expected = models.flatten(unsharded(models.Batch(given)))
        assert_same(captured(on_gpu(given, gpu, hides=False)), expected)


def replays_of_stored_rows() -> None:
    for kind, types in (("ebc", ["int8", "int4", "int8", "fp16"]), ("ec", ["int8"] * 4)):
        run(2, replay_stored_rows, kind, types, deadline=120)


def refusals_of_captures() -> None:
    run(2, refuse, deadline=120)


def capture(node: Node) -> None:
    gpu = fake()
    node.captured = CapturedForward(node.model, moved((node.batches[0], torch.ones(1)), gpu)[0])
    look_up(node, 1)


def look_up(node: Node, version: int) -> None:
    batch, _ = moved((node.batches[0], torch.ones(1)), fake())

    def found() -> dict[str, torch.Tensor]:
        return {name: each.cpu() for name, each in node.captured(batch).items()}

    def serves() -> bool:
        found()
        return version_of(node.model) == str(version)

    until(serves)
    models.assert_same_bits(found(), node.expected.of(version, 0))


def stay_busy(node: Node, is_busy: bool, version: int) -> None:
    """Replays once more, whose reads the GPU does not finish, and replays no more."""
    fake().cuda.is_busy = is_busy
    if is_busy:
        look_up(node, version)
        until(lambda: ServedModel.of(node.model)._pins.held[0] == 0)


def replays_of_refreshed_rows() -> None:
    """A replay keeps the rows that it reads, as a forward does."""
    with keeper_and(REFRESHED[0], "reader") as processes:
        processes.call("reader", capture)
        for number in range(2, 6):
            processes.call(KEEPER, go_on, number)
            processes.call("reader", look_up, number)
        if not IS_FAKE:
            return
        processes.call("reader", stay_busy, True, 5)
        pid = processes.call("reader", nodes.pid_of)
        processes.call(KEEPER, go_on, 6)
        with pytest.raises(NodeFailedError, match=rf"PeerTimeoutError.*{pid}"):
            processes.call(KEEPER, go_on_soon, 7)
        processes.call("reader", stay_busy, False, 6)
        processes.call(KEEPER, go_on, 7)
        processes.call("reader", look_up, 7)


def capture_by_hand(rank: int) -> None:
    """What a graph of the user's would replay pins nothing."""
    model = served.sharded(DIRECT, GPU)
    batch = request(0)[0].to(GPU)
    with torch.no_grad():
        model(batch)
        with (
            pytest.raises(ValueError, match=r"by hand.*CapturedForward\(model, batch\)"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(batch)


def captures_by_hand() -> None:
    if not IS_FAKE:
        run(2, capture_by_hand, deadline=120)


CHECKS = {
    check.__name__: check
    for check in (
        replays,
        late_errors_of_replays,
        refusals_of_captures,
        replays_of_stored_rows,
        replays_of_refreshed_rows,
        captures_by_hand,
    )
}

if __name__ == "__main__":
    from tests.gpu import captured

    make(captured.CHECKS)
