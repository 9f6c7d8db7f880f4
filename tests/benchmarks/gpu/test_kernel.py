"""The Triton kernel gathers the rows that it is asked for, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.full

# The interpreter is chosen when a kernel is decorated: a process of its own.
GATHERS = """
import torch
from benchmarks.gpu.kernel import gather

torch.manual_seed(0)
for words in (32, 128):
    rows = torch.randint(-(2**62), 2**62, (1000, words))
    # 32 or 128 rows at once: part of them, all of them, and several times as many as blocks.
    for count, blocks in ((1, 1), (31, 3), (128, 1), (128, 8), (300, 1), (300, 3)):
        ids = torch.randint(1000, (count,))
        out = torch.full((count + 1, words), -1)
        gather(rows, ids, out[:count], blocks)
        assert torch.equal(out[:count], rows[ids]), (words, count, blocks)
        assert (out[count] == -1).all(), "written past the end"
print("all gathered")
"""


def test_rows_are_those_of_the_ids() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", GATHERS]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert run.stdout == "all gathered\n", run.stderr
