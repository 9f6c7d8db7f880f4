"""A short run of the fuzz program."""

import pytest

from tests.serve.fuzz import fuzz

pytestmark = pytest.mark.full


def test_damaged_requests_are_refused_or_fit() -> None:
    counts = fuzz(2000, 0)
    # Enough of both kinds, or the damage is too heavy or too light to show anything.
    for form in ("JSON", "gRPC"):
        assert counts[f"{form} accepted"] > 200 and counts[f"{form} refused"] > 200, counts
