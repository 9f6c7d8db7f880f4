"""Carried errors cancel over iterations, but for a ring of two bits, where they grow."""

import pytest

from benchmarks.quantized.cells import collectives
from benchmarks.quantized.page import relative_errors


@pytest.mark.parametrize("codec", ["uint8", "uint4"])
def test_compensation_mends_the_mean(codec: str) -> None:
    *plain, of_plain_mean = relative_errors(collectives(32, f"{codec} ring"))
    *errors, of_mean = relative_errors(collectives(32, f"{codec} ring EC"))
    assert plain[0] == plain[-1] == pytest.approx(of_plain_mean, rel=1e-3)
    assert errors[-1] < 2 * errors[0]
    assert of_mean < of_plain_mean / 8


def test_errors_of_a_ring_of_two_bits_grow() -> None:
    *errors, _ = relative_errors(collectives(32, "uint2 ring EC"))
    first, fifth, last = errors
    assert fifth > 2 * first and last > 2 * fifth


def test_errors_of_recursive_doubling_stay() -> None:
    *errors, of_mean = relative_errors(collectives(32, "uint2 RD EC"))
    assert errors[-1] < 2 * errors[0] and of_mean < errors[0]
