"""Which cases of a parametrized test are left to `make test-all`."""

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def slow_where(is_slow: Callable[[T], bool], cases: Iterable[T]) -> list[T | ParameterSet]:
    """Marks the cases of a test of one parameter, or of a tuple of several."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        if is_slow(case)
        else case
        for case in cases
    ]


def slow_but(kept: Collection[T], cases: Iterable[T]) -> list[T | ParameterSet]:
    """Marks all cases but those that are kept."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all among {cases}"
    return slow_where(lambda case: case not in kept, cases)


# For tests of the channel in which the transport has no part.
network_is_slow = pytest.mark.parametrize(
    "transport", slow_but(["shm"], ["shm", "tcp"]), indirect=True
)
