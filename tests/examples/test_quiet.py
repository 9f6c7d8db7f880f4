"""Examples say what they have to say, and nothing that others say of each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

BIN = Path(sys.executable).parent
# The start of two processes that import torch and TorchRec, on a busy machine.
DEADLINE = 180.0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("example", ["quickstart.py", "torchx_smoke.py"])
def test_an_example_has_no_warnings(example: str) -> None:
    program = ROOT / "examples" / example
    done = subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", program],
        # What torchrun would say that it has set.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    assert done.stdout
