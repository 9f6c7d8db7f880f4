"""The kernels give the CPU's bits, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.full

# Importing is most of a process's time.
CHECKS = [
    ["sums", "moved", "reader", "doctor"],
    ["copies", "bad_ids", "bad_ids_of_sequences"],
    ["nothing_is_read_beside_tables", "lengths_that_do_not_fit"],
    ["stored"],
]


@pytest.mark.parametrize("names", CHECKS, ids=" ".join)
def test_kernels_have_the_bits_of_the_cpu(names: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.interpreted", *names],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert run.stdout == "".join(f"{name}: as the CPU\n" for name in names), run.stderr
