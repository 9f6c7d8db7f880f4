"""Sharded models whose tables a GPU reads, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu import attached, ids, sharded
from tests.paths import ROOT

pytestmark = pytest.mark.full


CHECKS = [(module.__name__, name) for module in (sharded, ids, attached) for name in module.CHECKS]


@pytest.mark.parametrize(("module", "name"), CHECKS, ids=[name for _, name in CHECKS])
def test_a_gpu_gives_what_the_cpu_gives(module: str, name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", module, name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert run.stdout == f"{name}: as the CPU\n", run.stderr
