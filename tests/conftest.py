"""What tests of several folders need."""

import pytest

from torchrec_bls import _native


@pytest.fixture(scope="session")
def build_with_rdma() -> None:
    """Fails where the package was built without RDMA, which needs a header and no device."""
    assert _native.WITH_VERBS, (
        "this build has no RDMA, since infiniband/verbs.h was missing: install libibverbs-dev, "
        "then remove .venv/.built and run `make build`"
    )
