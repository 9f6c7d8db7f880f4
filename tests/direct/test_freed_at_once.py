"""What callers have is freed with them, and not when garbage is collected: it may be tables."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch import nn

from tests.direct.test_reuse import made, tables_in_memory, weights
from torchrec_bls.direct.serving.gate import Gate


class Kept:
    """Something that a caller has."""


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def is_freed_after(call: Callable[[], object]) -> bool:
    def caller() -> "weakref.ref[Kept]":
        kept = Kept()
        call()
        return weakref.ref(kept)

    return caller()() is None


def test_after_a_look_for_forwards_that_run() -> None:
    assert is_freed_after(lambda: Gate().admit_running(nn.Identity()))


def test_after_a_search_for_pieces() -> None:
    """Their descriptors are other ones than was announced."""
    tables = tables_in_memory()
    part = made(tables, "1", weights(1), None)
    pid, _, *file = part.index.address
    address = (pid, 1 << 20, *file)
    assert is_freed_after(lambda: tables.part_at(0, "1", address))
