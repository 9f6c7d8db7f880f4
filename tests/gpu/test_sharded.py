"""Sharded models whose tables a GPU reads, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gpu import attached, captured, ids, sharded
from tests.paths import ROOT

pytestmark = pytest.mark.full


# Imports take longer than most checks.
_AT_ONCE = 10


def groups() -> Iterator[tuple[str, list[str]]]:
    for module in (sharded, ids, attached, captured):
        names = list(module.CHECKS)
        for at in range(0, len(names), _AT_ONCE):
            yield module.__name__, names[at : at + _AT_ONCE]


@pytest.mark.parametrize(
    ("module", "names"), groups(), ids=[" ".join(names) for _, names in groups()]
)
def test_a_gpu_gives_what_the_cpu_gives(module: str, names: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", module, *names],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=1500,
    )
    assert run.stdout == "".join(f"{name}: as the CPU\n" for name in names), run.stderr
