"""The share of requests that were refused lately."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.serve.refusals import Refusals


def test_it_is_that_of_the_last_second_or_less() -> None:
    refusals = Refusals()
    assert refusals.share == 0
    for number in range(100):
        refusals.add(number % 4 == 0, 7.0 + number / 1000)
    assert refusals.share == pytest.approx(0.25)
    for number in range(100):
        refusals.add(True, 7.5 + number / 1000)
    assert refusals.share == pytest.approx(0.625)
    refusals.add(False, 8.1)
    assert refusals.share == pytest.approx(100 / 101)


def test_what_is_long_ago_counts_no_more() -> None:
    refusals = Refusals()
    refusals.add(True, 7.0)
    refusals.add(False, 8.1)
    assert refusals.share == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.4)), max_size=50))
def test_it_is_a_share_of_recent_ones(decided: list[tuple[bool, float]]) -> None:
    """Against all that are in the half second under way and the one before."""
    refusals, now, seen = Refusals(), 10.0, []
    for is_refused, pause in decided:
        now += pause
        refusals.add(is_refused, now)
        seen.append((is_refused, now))
        recent = [refused for refused, at in seen if at > now - 0.5]
        older = [refused for refused, at in seen if at > now - 1.5]
        share = refusals.share
        assert 0 <= share <= 1
        if all(older):
            assert share == 1
        if not any(older):
            assert share == 0
        assert recent
