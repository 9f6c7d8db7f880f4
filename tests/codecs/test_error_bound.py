"""Bounds, and how they decay."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls import Decay, ErrorBound
from torchrec_bls.codecs.error_bound import bound_at, factor_at


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("stepwise", {0: 3, 24: 3, 25: 2.5, 49: 2.5, 50: 2, 75: 1.5, 99: 1.5, 100: 1, 10**9: 1}),
        ("linear", {0: 3, 25: 2.5, 50: 2, 99: 1.02, 100: 1}),
        ("logarithmic", {0: 3, 9: 3 - 2 * math.log(10) / math.log(101), 100: 1}),
    ],
)
def test_factors_are_those_of_the_paper_by_iteration(kind: str, factors: dict[int, float]) -> None:
    decay = Decay(start=3.0, iterations=100, steps=4, kind=kind)
    assert {at: factor_at(decay, at) for at in factors} == pytest.approx(factors)


@given(
    bound=st.floats(2.0**-120, 2.0**100),
    start=st.floats(1.001, 100),
    kind=st.sampled_from(["stepwise", "linear", "logarithmic"]),
    iterations=st.integers(1, 10**6),
    steps=st.integers(1, 50),
    addends=st.integers(1, 64),
    data=st.data(),
)
def test_a_bound_in_force_is_a_float32_that_shares_keep_and_later_ones_do_not_exceed(
    bound: float, start: float, kind: str, iterations: int, steps: int, addends: int, data: Any
) -> None:
    decay = Decay(start, iterations, steps, kind)
    limited = ErrorBound(bound, decay)
    first, second = sorted(data.draw(st.integers(0, iterations + 2)) for _ in range(2))
    early, late = bound_at(limited, first, addends), bound_at(limited, second, addends)
    assert early == np.float32(early) and late == np.float32(late)
    assert late <= early * (1 + 1e-6)
    assert addends * early <= bound * factor_at(decay, first)
    assert bound_at(limited, iterations, addends) == bound_at(ErrorBound(bound), 0, addends)
    assert bound_at(ErrorBound(bound), 0) >= bound * (1 - 2.0**-23)


@pytest.mark.parametrize(
    ("bound", "decay", "said"),
    [
        (0, None, "the error bound is 0, but must be from 1.18e-38"),
        (-0.1, None, "the error bound is -0.1"),
        (math.nan, None, "the error bound is nan"),
        (math.inf, None, "the error bound is inf"),
        (1e-40, None, "the error bound is 1e-40"),
        ("0.1", None, "the error bound is '0.1'"),
        (True, None, "the error bound is True"),
        (2.0**110, Decay(2.0, 10), "starts at 2.0 times that, above 1.3e[+]33: lower one"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(bound: Any, decay: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ErrorBound(bound, decay)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1.0, 10), "decay starts at 1.0 times the bound, but must start above 1 time"),
        ((math.inf, 10), "decay starts at inf times"),
        ((2.0, 0), "decay has 0 iterations, but needs a positive number"),
        ((2.0, 1.5), "decay has 1.5 iterations"),
        ((2.0, 10, 0), "decay has 0 steps"),
        ((2.0, 10, 4, "cosine"), "decay is 'cosine', but must be one of stepwise, linear, log"),
    ],
)
def test_a_decay_that_is_none_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Decay(*arguments)
