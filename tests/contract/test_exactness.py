"""The installed TorchRec, whichever it is, gives the same results with bounded-lag exchanges."""

from functools import cache
from importlib import metadata
from typing import TypeVar

import pytest
import torchrec
from torchrec.models.dlrm import DLRMTrain

from tests.distributed.pipeline.test_pipeline import pipe_dlrm
from tests.distributed.pipeline.test_torchrec_pipelines import PIPELINES, train_in_pipelines
from tests.distributed.results.test_exactness import KINDS, compare_with_torchrec
from tests.distributed.results.test_training import train_both
from tests.distributed.test_reshard import MOVES, reshard_while_training
from tests.processes import run

T = TypeVar("T")


def exhaustive(test: T) -> T:
    """Marks what tests/distributed has, with more ranks: `make test-trio` runs it with another
    TorchRec."""
    marked: T = pytest.mark.slow(pytest.mark.trio(test))
    return marked


def torchrec_of(rank: int) -> tuple[str, str]:
    return metadata.version("torchrec"), torchrec.__file__


def test_ranks_run_the_torchrec_of_the_tests() -> None:
    assert run(2, torchrec_of) == [torchrec_of(0)] * 2


@cache
def comparison(kind: str) -> list[dict[str, str | None]]:
    return run(2, compare_with_torchrec, 2, KINDS[kind])


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_sharding_type_and_bound(kind: str) -> None:
    for failures in comparison(kind):
        assert {case: why for case, why in failures.items() if why} == {}


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind: str) -> None:
    run(2, train_both, KINDS[kind], 2, "rowwise-adagrad", True)


@exhaustive
def test_pipeline() -> None:
    run(2, pipe_dlrm, DLRMTrain)


@exhaustive
@pytest.mark.parametrize("name", PIPELINES)
@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_torchrecs_pipelines(kind: str, name: str) -> None:
    run(2, train_in_pipelines, KINDS[kind], "mixed", name)


@exhaustive
@pytest.mark.parametrize("move", MOVES)
def test_resharding(move: str) -> None:
    run(2, reshard_while_training, KINDS["ebc"], move, "rowwise-adagrad")
