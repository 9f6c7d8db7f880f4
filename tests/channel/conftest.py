"""Every test of the channel runs over shared memory and over TCP."""

from functools import partial

import pytest

from tests import processes
from torchrec_bls import BoundedLagChannel


def make_default(transport: str) -> None:
    """Channels of this process have `transport` unless they are told otherwise."""
    defaults = BoundedLagChannel.__init__.__kwdefaults__
    assert "transport" in defaults
    defaults["transport"] = transport


def used(transport: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has all channels of the test's ranks use a transport."""
    monkeypatch.setattr(processes, "preparation", partial(make_default, transport))
    return transport


@pytest.fixture(params=["shm", "tcp"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport of all channels of the test's ranks."""
    return used(request.param, monkeypatch)
