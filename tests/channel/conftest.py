"""Every test of the channel runs over the one-sided transport and over the two-sided one."""

from functools import partial

import pytest

from tests import processes
from torchrec_bls import BoundedLagChannel


def make_default(transport: str) -> None:
    """Channels of this process have `transport` unless they are told otherwise."""
    defaults = BoundedLagChannel.__init__.__kwdefaults__
    assert "transport" in defaults
    defaults["transport"] = transport


@pytest.fixture(params=["shm", "c10d"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport of all channels of the test's ranks."""
    chosen: str = request.param
    monkeypatch.setattr(processes, "preparation", partial(make_default, chosen))
    return chosen
