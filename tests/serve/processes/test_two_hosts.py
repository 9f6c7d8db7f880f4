"""Two hosts, which are network namespaces here, behind one proxy: one may die, and no request is
lost."""

import os
import sys
from pathlib import Path

import pytest

from tests.launch import two_hosts
from tests.serve import ranker

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def hosts() -> None:
    reason = two_hosts.why_not()
    assert not reason, reason


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")  # names of sockets have to be short


def run(folder: Path, *todo: str) -> None:
    ranker.write_checkpoint(folder, 1)
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    program = [sys.executable, "-m", "tests.serve.processes.hosts", str(folder), *todo]
    ended = two_hosts.run(["env", path, "PYTHONPATH=.", *program], deadline=240.0)
    text = "\n".join(process.stdout for process in ended)
    assert [process.returncode for process in ended] == [0, 0], text
    assert all(f"{what}: " in text for what in todo)


def test_a_cable_that_is_cut_and_a_service_that_is_killed(folder: Path) -> None:
    run(folder, "cut", "kill")


@pytest.mark.slow
def test_a_service_that_is_told_to_end(folder: Path) -> None:
    run(folder, "end")
