"""What tests of several folders need, and which of them start ranks."""

import os
from types import ModuleType

import pytest
from hypothesis import settings

from torchrec_bls import _native

# Nothing here, in examples or in tutorials uses a name of ours that goes (`filterwarnings` of
# pyproject.toml, for the processes that tests start).
os.environ.setdefault("PYTHONWARNINGS", "error:torchrec_bls.:FutureWarning")

# An example may take as long as the machine makes it take.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is in a module that runs ranks is `full`."""
    for item in items:
        module = getattr(item, "module", None)
        if module is not None and _runs_ranks(module):
            item.add_marker("full")


def _runs_ranks(module: ModuleType) -> bool:
    launchers = ("tests.processes", "torchrec_bls.processes")
    return any(getattr(value, "__module__", None) in launchers for value in vars(module).values())


@pytest.fixture(scope="session")
def build_with_rdma() -> None:
    """Fails where the package was built without RDMA, which needs a header and no device."""
    assert _native.WITH_VERBS, (
        "this build has no RDMA, since infiniband/verbs.h was missing: install libibverbs-dev, "
        "then remove .venv/.built and run `make build`"
    )
