"""Host memory is registered whole or not at all, and unregistered before it is unmapped."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.fake_cuda import FakeCuda, FakeEvent
from tests.paths import ROOT
from torchrec_bls.direct.gpu import registration
from torchrec_bls.direct.gpu.cuda import READ_ONLY_SUPPORTED, SAME_ADDRESSES
from torchrec_bls.direct.gpu.registration import PIECE_BYTES, Registration, RegistrationError

PAGE = 4096
ADDRESS = 0x7F0000000000
SIZE = 3 * PIECE_BYTES + 5 * PAGE


class Mapping:
    """What stands for a mapping; it is unmapped when nothing refers to it."""


def registration_of(
    cuda: FakeCuda, ranges: list[tuple[int, int]], mapping: Mapping, fails: bool = False
) -> Registration:
    return Registration(cuda, ranges, mapping, lambda: FakeEvent(cuda, fails))


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    registration._kept.clear()


def test_memory_is_registered_in_pieces() -> None:
    cuda = FakeCuda()
    registered = registration_of(cuda, [(ADDRESS, SIZE)], Mapping())
    assert cuda.registered == {
        ADDRESS: PIECE_BYTES,
        ADDRESS + PIECE_BYTES: PIECE_BYTES,
        ADDRESS + 2 * PIECE_BYTES: PIECE_BYTES,
        ADDRESS + 3 * PIECE_BYTES: 5 * PAGE,
    }
    registered.close()
    registered.close()
    assert not cuda.registered and cuda.calls["unregister"] == 4


def test_no_piece_is_of_two_files() -> None:
    cuda = FakeCuda()
    behind = ADDRESS + PIECE_BYTES + PAGE
    ranges = [(ADDRESS, PIECE_BYTES + PAGE), (behind, 2 * PAGE)]
    with pytest.raises(
        RegistrationError, match=f"8192 bytes behind the first {PIECE_BYTES + PAGE}"
    ):
        registration_of(FakeCuda([("register", 2)]), ranges, Mapping())
    registered = registration_of(cuda, ranges, Mapping())
    assert cuda.registered == {
        ADDRESS: PIECE_BYTES,
        ADDRESS + PIECE_BYTES: PAGE,
        behind: 2 * PAGE,
    }
    registered.close()
    assert not cuda.registered


@given(
    st.lists(st.integers(0, 5), max_size=3, unique=True),
    st.lists(st.integers(0, 12), max_size=2, unique=True),
)
def test_nothing_stays_registered(registering: list[int], unregistering: list[int]) -> None:
    """Whichever calls fail, but for one that fails twice."""
    unregistering = [each for each in unregistering if each - 1 not in unregistering]
    failing = [("register", each) for each in registering]
    failing += [("unregister", each) for each in unregistering]
    cuda = FakeCuda(failing)
    fails = any(each < 4 for each in registering)
    try:
        registration_of(cuda, [(ADDRESS, SIZE)], Mapping()).close()
    except RegistrationError as error:
        assert fails
        assert "cudaHostRegister returned 2 (cudaErrorMemoryAllocation)" in str(error)
        assert "24.0 GiB of host tables" in str(error) and "CUDA 13.0" in str(error)
        assert "Look up on the CPU instead" in str(error)
    else:
        assert not fails
    assert not cuda.registered and not cuda.latched and not registration._kept


def test_the_error_says_which_piece() -> None:
    with pytest.raises(RegistrationError) as raised:
        registration_of(FakeCuda([("register", 3)]), [(ADDRESS, SIZE)], Mapping())
    assert f"{5 * PAGE} bytes behind the first {3 * PIECE_BYTES}" in str(raised.value)


@pytest.mark.parametrize(
    "lacking, text",
    [
        (READ_ONLY_SUPPORTED, "registers no memory that is mapped read-only"),
        (SAME_ADDRESSES, "has other addresses for host memory"),
    ],
)
def test_a_gpu_that_cannot_is_named_before_a_call(lacking: int, text: str) -> None:
    attributes = {READ_ONLY_SUPPORTED: 1, SAME_ADDRESSES: 1, lacking: 0}
    cuda = FakeCuda(attributes=attributes)
    with pytest.raises(RegistrationError, match=text) as raised:
        registration_of(cuda, [(ADDRESS, SIZE)], Mapping())
    assert "driver of CUDA 13.0" in str(raised.value)
    assert 'BLSConfig(lookup="exchange")' in str(raised.value)
    assert not cuda.calls["register"]


def test_the_gpu_reads_to_its_end_first() -> None:
    cuda = FakeCuda()
    registration_of(cuda, [(ADDRESS, PAGE)], Mapping()).close()
    assert cuda.trace == ["register", "synchronize", "unregister"]


def test_memory_stays_mapped_until_it_is_unregistered() -> None:
    cuda = FakeCuda()
    mapping = Mapping()
    is_mapped = weakref.ref(mapping)
    registered = registration_of(cuda, [(ADDRESS, PAGE)], mapping)
    weakref.finalize(mapping, cuda.trace.append, "unmap")
    del mapping
    gc.collect()
    assert is_mapped() is not None
    del registered
    gc.collect()
    assert cuda.trace == ["register", "synchronize", "unregister", "unmap"]


def test_memory_that_cuda_keeps_stays_mapped() -> None:
    cuda = FakeCuda([("unregister", 1), ("unregister", 2)])
    mapping = Mapping()
    registered = registration_of(cuda, [(ADDRESS, SIZE)], mapping)
    with pytest.raises(RegistrationError, match="cudaHostUnregister returned 2") as raised:
        registered.close()
    assert "restart it" in str(raised.value)
    assert len(cuda.registered) == 1  # the others are given back
    assert registration._kept == [mapping] and not cuda.latched
    registered.close()


def test_memory_stays_mapped_where_cuda_has_failed() -> None:
    cuda = FakeCuda()
    mapping = Mapping()
    registered = registration_of(cuda, [(ADDRESS, PAGE)], mapping, fails=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        registered.close()
    assert registration._kept == [mapping]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("begun", [False, True])
def test_interrupts_leave_nothing_registered(at: int, begun: bool) -> None:
    class Interrupted(FakeCuda):
        def register(self, address: int, size: int, flags: int) -> int:
            is_last = self.calls["register"] == at
            if not is_last or begun:
                super().register(address, size, flags)
            if is_last:
                raise KeyboardInterrupt
            return 0

    cuda = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        registration_of(cuda, [(ADDRESS, SIZE)], Mapping())
    assert not cuda.registered and not cuda.latched


def test_a_forked_child_calls_no_cuda() -> None:
    cuda = FakeCuda()
    registered = registration_of(cuda, [(ADDRESS, PAGE)], Mapping())
    before = list(cuda.trace)
    child = os.fork()
    if child == 0:
        try:
            registered.close()
            os._exit(0 if cuda.trace == before and not registration._kept else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    registered.close()
    assert not cuda.registered


# Python ends what is global after `atexit`, in any order.
ENDING = """
import atexit
from tests.gpu.fake_cuda import FakeCuda
from torchrec_bls.direct.gpu.registration import Registration

class Gone(FakeCuda):
    def unregister(self, address):
        print("called CUDA")
        return 4

class Mapping:
    pass

registered = Registration(Gone(), [(4096, 4096)], Mapping(), Gone)
"""


def test_cuda_is_left_alone_at_the_end_of_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
