"""A deadline that no clock counts to is refused wherever one is given."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

from torchrec_bls import BLSConfig, BLSOptions, BoundedLagChannel, attach, publish
from torchrec_bls.direct.serving.publisher import Publication

NOWHERE: Any = None


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: no channel is made."""


def in_the_environment(deadline: Any) -> None:
    with mock.patch.dict("os.environ", TORCHREC_BLS_BACKEND=f"deadline={deadline}"):
        BLSOptions.from_environment()


GIVEN: list[Callable[[Any], Any]] = [
    lambda deadline: BLSConfig(deadline=deadline),
    lambda deadline: BLSOptions(deadline=deadline),
    in_the_environment,
    lambda deadline: BoundedLagChannel(NOWHERE, slot_bytes=1024, deadline=deadline),
    lambda deadline: attach(nn.Linear(1, 1), "nowhere", deadline=deadline),
    lambda deadline: publish(nn.Linear(1, 1), deadline=deadline),
    lambda deadline: Publication("1", False, 0, 1, mock.Mock(), []).wait(deadline),
]


@pytest.mark.parametrize("deadline", [float("inf"), float("nan"), -1.0, 0, 1e10, "soon", True])
@pytest.mark.parametrize("give", GIVEN)
def test_it_is_refused(give: Callable[[Any], Any], deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline"):
        give(deadline)
