"""Sharded models whose tables a GPU reads, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.sharded import CHECKS
from tests.paths import ROOT

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_gives_what_the_cpu_gives(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sharded", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert run.stdout == f"{name}: as the CPU\n", run.stderr
