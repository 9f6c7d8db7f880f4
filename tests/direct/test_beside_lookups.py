"""Publications compute with the thread that makes them."""

import threading

import pytest
import torch

from torchrec_bls.direct.beside_lookups import one_torch_thread
from torchrec_bls.direct.steps import RowsRead, Run


@pytest.fixture
def two_threads() -> object:
    """Gives torch two threads for the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_it_holds_for_the_calling_thread_alone() -> None:
    others = []
    with pytest.raises(KeyError), one_torch_thread():
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        other.start()
        other.join()
        raise KeyError
    assert torch.get_num_threads() == 2
    assert others == [2]


@pytest.mark.usefixtures("two_threads")
def test_steps_are_read_and_stored_by_one_thread() -> None:
    seen = []

    def read(first: int, end: int) -> RowsRead:
        seen.append(torch.get_num_threads())
        rows = torch.ones(end - first, 4)
        return RowsRead((rows,), lambda: seen.append(torch.get_num_threads()) or rows)

    [step] = Run("t", 0, 0, 160, 16, 16, read).steps(0, 160)
    assert step.stored().numel() == 160
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
