"""What tests of several folders need."""

import pytest
from hypothesis import settings

from torchrec_bls import _native

# An example may take as long as the machine makes it take.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def build_with_rdma() -> None:
    """Fails where the package was built without RDMA, which needs a header and no device."""
    assert _native.WITH_VERBS, (
        "this build has no RDMA, since infiniband/verbs.h was missing: install libibverbs-dev, "
        "then remove .venv/.built and run `make build`"
    )
