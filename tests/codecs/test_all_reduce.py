"""Quantized all-reduce among processes, against its emulation and against exact sums."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.quantized import emulation
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls.codecs.rows import Codec, round_trip
from torchrec_bls.collective.quantized import quantized_all_reduce

SHAPES = [(16, 12), (13, 5), (3, 40), (1, 1), (0, 4)]
CODECS = [Codec.UINT8, Codec.UINT4, Codec.UINT2]
ITERATIONS = 3


def values_of(nodes: int, shape: tuple[int, int], iteration: int) -> torch.Tensor:
    """The same on every rank: what each node reduces."""
    generator = torch.Generator().manual_seed(1000 * nodes + 10 * shape[0] + iteration)
    return torch.randn(nodes, *shape, generator=generator)


def emulated(algorithm: str, group_size: int, **arguments: Any) -> torch.Tensor:
    if algorithm == "ring":
        return emulation.ring_all_reduce(**arguments)
    return emulation.recursive_doubling_all_reduce(**arguments, group_size=group_size)


def reduced(
    values: torch.Tensor,
    codec: Codec,
    algorithm: str,
    group_size: int,
    error: torch.Tensor | None,
) -> torch.Tensor:
    """The collective's result of a rank's values, which stay as they are."""
    assert dist.group.WORLD is not None
    rows = values.clone()
    quantized_all_reduce(
        rows,
        dist.group.WORLD,
        codec=codec,
        algorithm=algorithm,
        error=error,
        group_size=group_size,
    )
    return rows


def reduce_as_emulated(rank: int, world: int, algorithm: str, group_sizes: list[int]) -> None:
    for group_size in group_sizes:
        for shape in SHAPES:
            for codec in CODECS:
                # Recursive doubling within one group has nothing to compensate.
                one_group = algorithm == "recursive_doubling" and group_size >= world
                for compensated in (False,) if one_group else (False, True):
                    error = torch.zeros(shape) if compensated else None
                    errors = torch.zeros(world, *shape) if compensated else None
                    for iteration in range(ITERATIONS):
                        values = values_of(world, shape, iteration)
                        rows = reduced(values[rank], codec, algorithm, group_size, error)
                        expected = emulated(
                            algorithm, group_size, values=values, codec=codec, error=errors
                        )
                        assert rows.numpy().tobytes() == expected.numpy().tobytes()
                        if error is not None and errors is not None:
                            assert error.numpy().tobytes() == errors[rank].numpy().tobytes()


@pytest.mark.parametrize(
    "world",
    [pytest.param(2, marks=pytest.mark.smoke), *slow_but([], [3, 4, 8])],
)
def test_ring_equals_its_emulation_bit_for_bit(world: int) -> None:
    run(world, reduce_as_emulated, world, "ring", [8])


@pytest.mark.parametrize(
    ("world", "group_sizes"),
    slow_but([(2, [1, 8])], [(2, [1, 8]), (4, [1, 2, 4]), (8, [1, 2, 8])]),
)
def test_recursive_doubling_equals_its_emulation_bit_for_bit(
    world: int, group_sizes: list[int]
) -> None:
    run(world, reduce_as_emulated, world, "recursive_doubling", group_sizes)


def test_recursive_doubling_in_groups_of_any_size() -> None:
    run(6, reduce_as_emulated, 6, "recursive_doubling", [3])


def reduce_what_is_not_finite(rank: int) -> None:
    assert dist.group.WORLD is not None
    for algorithm in ("ring", "recursive_doubling"):
        rows = torch.ones(6, 8)
        if rank == 1:
            rows[3, 2] = torch.inf
        quantized_all_reduce(rows, dist.group.WORLD, codec=Codec.UINT4, algorithm=algorithm)
        expected = torch.full((6, 8), 3.0)
        expected[3, 2] = torch.inf
        assert torch.equal(rows, expected)


def test_rows_that_are_not_finite_arrive_as_they_are() -> None:
    run(3, reduce_what_is_not_finite)


def recover_from_what_is_not_finite(rank: int) -> None:
    """FP16 makes an infinity of 1e5; the rows of the integer codecs are escaped."""
    for algorithm in ("ring", "recursive_doubling"):
        for codec in (Codec.UINT4, Codec.FP16):
            for spoiled in (torch.inf, torch.nan, 1e5):
                error, errors = torch.zeros(8, 6), torch.zeros(4, 8, 6)
                for iteration in range(3):
                    values = values_of(4, (8, 6), iteration)
                    if iteration == 0:
                        values[1, :, 2] = spoiled
                    expected = emulated(algorithm, 2, values=values, codec=codec, error=errors)
                    rows = reduced(values[rank], codec, algorithm, 2, error)
                    assert rows.numpy().tobytes() == expected.numpy().tobytes()
                    assert error.isfinite().all() and errors.isfinite().all()
                    assert rows.isfinite().all() or iteration == 0
                assert errors.count_nonzero() > 0


def test_errors_survive_what_is_not_finite() -> None:
    run(4, recover_from_what_is_not_finite)


def hand_computed_ring() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two nodes, one row each part, uint2 with a scale of 1: rounding by hand."""
    values = torch.tensor([[[0.0, 1.4, 3.0], [0.0, 0.6, 3.0]], [[0.0, 1.0, 0.0], [0.0, 2.4, 3.0]]])
    # Part 0 starts at node 1 (0 1 0 has scale 1/3 and is exact) and is summed at node 0:
    # 0 2.4 3 becomes 0 2 3. Part 1 starts at node 0, 0 0.6 3 becomes 0 1 3, and is summed at
    # node 1: 0 3.4 6 has scale 2 and becomes 0 4 6.
    result = torch.tensor([[0.0, 2.0, 3.0], [0.0, 4.0, 6.0]])
    lost = torch.zeros(2, 2, 3)
    lost[0, 0, 1], lost[1, 1, 1] = 0.4, -0.6
    return values, result, lost


def test_ring_of_two_by_hand() -> None:
    values, result, lost = hand_computed_ring()
    error = torch.zeros_like(values)
    torch.testing.assert_close(
        emulation.ring_all_reduce(values, Codec.UINT2, error), result, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(error, lost, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nodes", [1, 2, 5, 32])
def test_eight_bits_are_close_to_the_exact_sum(nodes: int) -> None:
    values = values_of(nodes, (64, 16), 0)
    exact = values.sum(0)
    ring = emulation.ring_all_reduce(values, Codec.UINT8)
    assert (ring - exact).norm() / exact.norm() < 0.02
    if nodes != 5:
        doubling = emulation.recursive_doubling_all_reduce(values, Codec.UINT8)
        assert (doubling - exact).norm() / exact.norm() < 0.02


def test_error_compensation_makes_the_sum_over_iterations_right() -> None:
    values = values_of(4, (8, 16), 0)
    error = torch.zeros_like(values)
    with_it, without = torch.zeros(8, 16), torch.zeros(8, 16)
    for _ in range(100):
        with_it += emulation.ring_all_reduce(values, Codec.UINT4, error)
        without += emulation.ring_all_reduce(values, Codec.UINT4)
    exact = 100 * values.sum(0)
    # What a part's first node sends is rounded without compensation.
    assert (with_it - exact).norm() < 0.7 * (without - exact).norm()


def test_an_all_to_all_quantizes_once() -> None:
    rows = torch.randn(10, 6)
    assert torch.equal(emulation.all_to_all(rows, Codec.UINT4), round_trip(rows, Codec.UINT4))


@pytest.mark.parametrize(("nodes", "group_size"), [(3, 2), (6, 1), (6, 2), (12, 8)])
def test_recursive_doubling_says_what_it_needs(nodes: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="needs a power of two of groups"):
        emulation.recursive_doubling_all_reduce(
            torch.zeros(nodes, 4, 4), Codec.UINT8, group_size=group_size
        )


def reduce_in_an_unfit_world(rank: int) -> None:
    assert dist.group.WORLD is not None
    for group_size in (1, 2):
        with pytest.raises(ValueError, match="needs a power of two of groups"):
            quantized_all_reduce(
                torch.zeros(4, 4),
                dist.group.WORLD,
                codec=Codec.UINT8,
                algorithm="recursive_doubling",
                group_size=group_size,
            )


def test_real_recursive_doubling_says_what_it_needs() -> None:
    run(3, reduce_in_an_unfit_world)


def test_compensation_without_effect_is_refused() -> None:
    values = torch.zeros(8, 4, 4)
    with pytest.raises(ValueError, match="all 8 ranks are one group: choose a smaller group_size"):
        emulation.recursive_doubling_all_reduce(values, Codec.UINT4, torch.zeros_like(values))
    alone = torch.ones(1, 4, 4)
    summed = emulation.recursive_doubling_all_reduce(alone, Codec.UINT4, torch.zeros_like(alone))
    assert torch.equal(summed, alone[0])


def give_bad_arguments(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    good = torch.zeros(4, 4)
    for rows, arguments, message in (
        (good, {"algorithm": "tree"}, "algorithm is 'tree', but has to be one of ring"),
        (good.double(), {}, "rows is torch.float64 on cpu"),
        (torch.zeros(4, 8)[:, :4], {}, "rows has shape"),
        (good, {"error": torch.zeros(4, 5)}, "error has shape"),
        (good, {"algorithm": "recursive_doubling", "group_size": 0}, "group_size is 0"),
        (good, {"algorithm": "recursive_doubling", "error": good.clone()}, "all 2 ranks are one"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_all_reduce(rows, group, codec=Codec.UINT8, **arguments)


def test_bad_arguments_are_refused() -> None:
    run(2, give_bad_arguments)
