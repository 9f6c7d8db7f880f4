"""One service for all tests that do it no harm."""

from collections.abc import Iterator

import pytest

from tests.serve import ranker
from tests.serve.running import Running, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    checkpoint = ranker.write_checkpoint(folder, 1)
    # With time enough for any machine: what is late is no matter of these tests.
    options = ["--checkpoint", str(checkpoint), "--deadline-ms", "60000"]
    options += ["--max-samples", "64", "--max-body-mib", "1"]
    with running(folder, *options) as service:
        yield service
