"""Forms of host memory, on a CUDA that works and on one that fails at each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu import facts, gathers, memory, registrations
from benchmarks.gpu.peers import VMM, measure_vmm
from benchmarks.gpu.registrations import WAYS
from benchmarks.gpu.runtime import CudaError, Runtime
from tests.benchmarks.gpu.fake_cuda import FakeCuda, Fault
from tests.tiers import slow_but

SIZE, PIECE = 2 * memory.HUGE, memory.HUGE
NOTHING = FakeCuda().left()

#: Repeated, or the text of another error or of an attribute.
SILENT = {"cudaHostUnregister", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"}
SILENT |= {"cudaGetLastError", "cuGetErrorName", "cuDeviceGetAttribute"}

Work = Callable[[Runtime], Iterator[dict[str, Any]]]


def of_way(way: str) -> Work:
    return lambda runtime: registrations.measure(runtime, way, True, SIZE, PIECE)


WORKS: dict[str, Work] = {
    **{way: of_way(way) for way in ("guarded", "sealed", "private copy of sealed", "anonymous")},
    "vmm": lambda runtime: measure_vmm(runtime, next(iter(VMM)), SIZE),
    "gathers": lambda runtime: gathers.measure(
        runtime, "guarded", False, SIZE, PIECE, [1 << 14], [1, 2]
    ),
    "beside": lambda runtime: gathers.measure_beside(
        runtime, "guarded", False, SIZE, 1 << 14, [1], 16
    ),
    "facts": facts.measure,
}


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_each_form_is_measured(way: str, huge: bool) -> None:
    runtime = FakeCuda()
    (found,) = registrations.measure(runtime, way, huge, SIZE, PIECE)
    how = WAYS[way]
    if how.flags:
        assert (found["code"], found["name"]) == (801, "CUDA_ERROR_NOT_SUPPORTED")
    elif not how.protection & memory.WRITE:
        assert (found["code"], found["name"]) == (1, "CUDA_ERROR_INVALID_VALUE")
    else:
        assert found["error"] == ""
        assert (found["rows"], found["wrong_rows"]) == (4096, 0)
        assert found["same_pointer"]
        assert {"Pss", "Anonymous", "Shmem", "free_hbm"} <= found["before"].keys()
        assert found["after"].keys() == found["before"].keys()
        assert runtime.calls["cudaHostRegister"] == 2
    assert found["huge_share"] == (1.0 if huge else 0.0)
    assert runtime.latched == 0
    assert runtime.left() == NOTHING


def test_registered_memory_takes_seals_but_that_of_its_contents() -> None:
    (found,) = registrations.measure(FakeCuda(), "guarded", True, SIZE, SIZE)
    seals = {key: found[key] for key in ("protect", "size_seals", "future_write_seal")}
    assert seals == {"protect": "", "size_seals": "", "future_write_seal": ""}
    assert found["write_seal"] == "EBUSY"


def test_wrong_rows_are_counted() -> None:
    with (
        memory.memory_file(SIZE) as fd,
        memory.mapped(fd, SIZE, memory.READ | memory.WRITE, memory.SHARED) as mapping,
    ):
        mapping.fill()
        rows = mapping.words.view(-1, 32)
        ids = torch.tensor([3, 1, 2, 2])
        by_gpu = rows[ids]
        assert registrations.wrong_rows(mapping, ids, by_gpu) == 0
        by_gpu[1, 5] += 1
        by_gpu[3, 31] = 0
        assert registrations.wrong_rows(mapping, ids, by_gpu) == 2
        rows[3, 0] = -1  # wrong in the memory itself
        assert registrations.wrong_rows(mapping, ids, rows[ids]) == 1


@pytest.fixture(autouse=True)
def few_bytes_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_COPIED", 1 << 10)
    monkeypatch.setattr(gathers, "_MOST", 3)


@pytest.fixture
def counted_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel walks through all memory of the process to count pages, several times a work."""
    monkeypatch.setattr(memory, "memory_kib", dict)
    none = dict.fromkeys(("rss", "pss", "anonymous"), 0)
    monkeypatch.setattr(memory.Mapping, "pages", lambda self: {**none, "huge": self.size})


@pytest.mark.usefixtures("counted_pages")
@pytest.mark.parametrize("every", slow_but([False], [False, True]))
@pytest.mark.parametrize("name", WORKS)
def test_nothing_is_left_after_a_failure_of_any_call(name: str, every: bool) -> None:
    """Of a function that is called in a loop, few calls stand for the others."""
    work = WORKS[name]
    whole = FakeCuda()
    expected = len(list(work(whole)))
    assert whole.left() == NOTHING
    for function, calls in whole.calls.items():
        some = {0, 1, calls // 2, calls - 1} & {*range(calls)}
        for at in range(calls) if every else sorted(some):
            runtime, error = FakeCuda([Fault(function, at)]), None
            found = []
            try:
                found += work(runtime)
            except (CudaError, RuntimeError) as raised:
                error = raised
            where = f"{function}, call {at}: {error}"
            assert runtime.left() == NOTHING, where
            assert runtime.latched == 0, where
            told = error is not None or any(each.get("error") for each in found)
            assert told or function in SILENT, where
            if not told:
                assert len(found) == expected, where


def test_a_registration_that_fails_in_the_middle_is_undone() -> None:
    runtime = FakeCuda([Fault("cudaHostRegister", at=1)])
    (found,) = of_way("anonymous")(runtime)
    assert found["error"] == "cudaHostRegister returned 2 (CUDA_ERROR_OUT_OF_MEMORY)"
    assert runtime.calls["cudaHostUnregister"] == 1
    assert runtime.left() == NOTHING


def test_memory_that_stays_registered_is_an_error() -> None:
    runtime = FakeCuda([Fault("cudaHostUnregister", times=2)])
    with pytest.raises(CudaError, match="cudaHostUnregister returned 2"):
        list(of_way("anonymous")(runtime))
    assert len(runtime.registered) == 1  # of two pieces; the process ends with it


def test_an_attribute_that_cannot_be_read_is_text() -> None:
    (found,) = facts.measure(FakeCuda([Fault("cuDeviceGetAttribute", at=1, code=801)]))
    values = list(found["attributes"].values())
    assert values[0] == 88
    assert values[1] == "cuDeviceGetAttribute returned 801 (CUDA_ERROR_NOT_SUPPORTED)"


def test_ids_are_as_drawn_of_one_table_after_the_other_or_in_order() -> None:
    drawn, of_tables, in_order = (gathers._ids(2600, 52, order) for order in gathers.ORDERS)
    assert set(drawn // 100 - drawn.sort().values // 100) != {0}
    assert (of_tables // 100).tolist() == [at // 2 for at in range(52)]
    assert in_order.tolist() == sorted(in_order.tolist())
    for ids in (drawn, of_tables, in_order):
        assert len(ids) == 52
        assert set(ids.tolist()) <= set(range(2600))


@pytest.mark.parametrize("order", gathers.ORDERS)
def test_few_rows_have_ids_of_all_orders(order: str) -> None:
    assert int(gathers._ids(3, 50, order).max()) < 3
