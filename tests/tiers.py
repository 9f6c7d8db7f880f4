"""Which cases of a parametrized test are left to `make test-all`."""

from collections.abc import Callable, Iterable
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
