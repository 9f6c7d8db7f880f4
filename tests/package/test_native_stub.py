"""`_native.pyi` is what the compiled module has."""

import pytest

from tests.package import native_stub

pytestmark = pytest.mark.full


def test_the_stub_is_that_of_the_module() -> None:
    message = "run `python -m tests.package.native_stub` after a change of csrc/bindings"
    assert native_stub.FILE.read_text() == native_stub.stub(), message
