"""A rank on each of two hosts, which are network namespaces here: the cable between them is cut, or
one of them vanishes without an end of its connections."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.faults.hosts import DEADLINE, SITUATIONS
from tests.launch import two_hosts
from tests.tiers import slow_but

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def hosts() -> None:
    reason = two_hosts.why_not()
    assert not reason, reason


@pytest.mark.parametrize("fault", slow_but(["vanish"], ["vanish", "cut"]))
def test_a_host_that_answers_nothing_is_told_by_its_rank(fault: str, tmp_path: Path) -> None:
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    program = [sys.executable, "-m", "tests.faults.hosts", fault, str(tmp_path)]
    ended = two_hosts.run(["env", path, "PYTHONPATH=.", *program], deadline=120.0)
    text = "\n".join(process.stdout for process in ended)
    assert [process.returncode for process in ended] == [0, 0], text
    for rank, process in enumerate(ended[: 2 if fault == "cut" else 1]):
        told = json.loads(process.stdout.splitlines()[-1])
        assert set(told) == set(SITUATIONS), text
        for situation, end in told.items():
            assert f"channel '{situation} {rank}' on rank {rank}, sequence 1" in end["message"]
            assert f": rank {1 - rank} " in end["message"]
        # Its wait and the connection have the same deadline.
        assert told["waiting"]["error"] in ("PeerDiedError", "PeerTimeoutError")
        assert told["waiting"]["seconds"] < 5 * DEADLINE
        for situation in ("idle", "sending"):
            assert told[situation]["error"] == "PeerDiedError", text
            assert "is lost" in told[situation]["message"]
            assert "its host answers nothing" in told[situation]["message"]
