"""What the late wait counts on inside torch: the order in which autograd runs nodes."""

from typing import Any

import pytest
import torch

USUAL, LATE = None, 0


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, order: list[str], x: torch.Tensor) -> torch.Tensor:
        ctx.noted = name, order
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        name, order = ctx.noted
        order.append(name)
        return None, None, gradients[0] * 2


def order_of(numbers: dict[str, int | None]) -> list[str]:
    """The order in which branches of one sum run in a backward, made in the order of `numbers`."""
    order: list[str] = []
    parameter = torch.ones(1, requires_grad=True)
    branches = []
    for name, number in numbers.items():
        branch = _Noted.apply(name, order, parameter)
        if number is not None:
            branch.grad_fn._set_sequence_nr(number)
        branches.append(branch)
    torch.stack(branches).sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0 * len(numbers)]
    return order


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"a": USUAL, "b": USUAL, "c": USUAL}, ["c", "b", "a"]),
        ({"a": USUAL, "b": LATE, "c": USUAL}, ["c", "a", "b"]),
        ({"a": LATE, "b": LATE + 1, "c": USUAL}, ["c", "b", "a"]),
    ],
)
def test_the_node_with_the_largest_number_runs_first(
    numbers: dict[str, int | None], expected: list[str]
) -> None:
    torch.ones(1, requires_grad=True).exp()  # so that the numbers of the branches exceed LATE + 1
    assert order_of(numbers) == expected


def test_gradients_of_parameters_are_accumulated_before_all_else() -> None:
    parameter = torch.ones(1, requires_grad=True)
    accumulate: Any = parameter.exp().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert accumulate._sequence_nr() == 2**64 - 1
