"""A contract promises what can be kept."""

import pytest

from torchrec_bls.serve.contract import Contract


@pytest.mark.parametrize("name", ["deadline_ms", "max_samples", "max_body_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_cant_be_promised(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, but must be above 0"):
        Contract(**{name: value})  # type: ignore[arg-type]


def test_defaults() -> None:
    assert Contract() == Contract(20.0, 2048, 16 << 20)
