"""What the tests of codecs share."""

from collections.abc import Iterator

import pytest

from torchrec_bls import _native

INSTRUCTION_SETS = ["portable", "avx2", "avx512"]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    names = _native.instruction_sets()
    if request.param not in names:
        pytest.skip(f"this processor has no {request.param}")
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(names[-1])
