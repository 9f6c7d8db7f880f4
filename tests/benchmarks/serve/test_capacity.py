"""The search for a server's capacity finds it, also where the machine stands still now and then."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serve.capacity import capacity
from benchmarks.serve.peers.grid import rough_capacity


class MadeUpServer:
    """Answers as many requests a second as it can, and no others; in some runs hardly any.

    Args:
        most: requests that it answers in a second.
        disturbed: numbers of the runs in which the machine stands still.
    """

    def __init__(self, most: float, disturbed: set[int]) -> None:
        self.runs = 0
        self._most = most
        self._disturbed = disturbed

    def run(self, rate: float, seconds: float, seed: int) -> Any:
        share = 0.1 if self.runs in self._disturbed else min(1.0, self._most / rate)
        self.runs += 1
        return SimpleNamespace(in_time_share=share, void=False, lag_p99_ms=0.0)


@pytest.mark.parametrize("first", [200.0, 5000.0])
@pytest.mark.parametrize("disturbed", [set(), *({at} for at in range(14)), {0, 3, 9}])
def test_a_capacity_is_found_despite_single_disturbances(first: float, disturbed: set[int]):
    server = MadeUpServer(1234.0, disturbed)
    found = capacity(server.run, first)
    # 99 % are enough.
    assert 1234 / 1.03 <= found.rate <= 1234 / 0.99
    assert len(found.confirmed) == 3
    assert found.searched[0][0] == first


@pytest.mark.parametrize("disturbed", [set(), {0}, {1}, {4}])
def test_a_rough_capacity_as_well(disturbed: set[int]):
    assert 1234 / 1.06 <= rough_capacity(MadeUpServer(1234.0, disturbed).run, 300, 5) <= 1247


def test_a_server_that_answers_nothing():
    with pytest.raises(RuntimeError, match="not even one request"):
        capacity(MadeUpServer(0.0, set()).run, 200.0)
