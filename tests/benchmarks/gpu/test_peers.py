"""Two real processes with one memory, of which the owner is killed, on a CUDA without a GPU."""

from __future__ import annotations

import time
from functools import partial

import pytest

from benchmarks.gpu import memory, peers
from benchmarks.gpu.children import ChildError
from tests.benchmarks.gpu.fake_cuda import FakeCuda, Fault

pytestmark = pytest.mark.full

SIZE = 4 * memory.HUGE


def soon() -> float:
    return time.monotonic() + 120


@pytest.mark.parametrize("way", ["guarded", "shared, writable", *peers.VMM])
def test_the_reader_goes_on_after_the_owners_death(way: str) -> None:
    (found,) = peers.measure(FakeCuda, way, True, SIZE, soon())
    assert found["reads_after_death"] == 20
    assert found["wrong_rows"] == 0
    assert found["memory"].keys() == {"owner", "reader"}
    if way == "guarded":
        steps = {name: found[name] for name in ("protect", "size_seals", "future_write_seal")}
        assert steps == dict.fromkeys(steps, "")
        assert "Operation not permitted" in found["later_writable_mapping"]


def test_a_refusal_names_the_call() -> None:
    with pytest.raises(ChildError, match="cudaHostRegister returned 1 "):
        list(peers.measure(FakeCuda, "sealed", True, SIZE, soon()))


@pytest.mark.parametrize(
    ("way", "function"),
    [
        ("guarded", "cuMemHostGetDevicePointer_v2"),
        (next(iter(peers.VMM)), "cuMemImportFromShareableHandle"),
    ],
)
def test_a_failure_of_the_reader_is_told(way: str, function: str) -> None:
    with pytest.raises(ChildError, match=f"{function} returned 2"):
        list(peers.measure(partial(FakeCuda, [Fault(function)]), way, True, SIZE, soon()))
    with pytest.raises(ChildError, match="no answer for 0 s"):
        list(peers.measure(FakeCuda, way, True, SIZE, time.monotonic()))
