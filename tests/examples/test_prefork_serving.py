"""The example of a pre-fork server, whose children end as scripts do."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

# The start of a process that imports torch and TorchRec, and 20 models, on a busy machine.
DEADLINE = 180.0


@pytest.mark.full
def test_children_follow_and_one_of_them_exits() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "prefork_serving.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 children served 20 versions; child 0 ended after 10\n"
