"""A service that can't start says why and how to mend it, and leaves nothing."""

import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.running import COMMAND, HOST, PATIENCE, descendants, free_ports, is_alive
from torchrec_bls.serve.processes.keeper_process import KeeperProcess, Keeping
from torchrec_bls.serve.service import Service

pytestmark = pytest.mark.full


@pytest.fixture
def keeps_process() -> Iterator[None]:
    """A service that runs in this process changes it."""
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.usefixtures("keeps_process")
def test_a_port_that_is_taken(taken: int, tmp_path: Path):
    with pytest.raises(OSError, match=rf"{HOST}:{taken}: .*in use.*\(--port\)"):
        Service(ranker.build, tmp_path / "none", port=taken).run()


@pytest.mark.usefixtures("keeps_process")
def test_a_port_for_grpc_that_is_taken(taken: int, tmp_path: Path):
    """It is found before tables are loaded, of which there are none here."""
    with pytest.raises(OSError, match=rf"{HOST}:{taken}: .*in use.*\(--grpc-port\)"):
        Service(ranker.build, tmp_path / "none", port=0, grpc_port=taken).run()


@pytest.mark.usefixtures("keeps_process")
@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        (HOST, 70_000, "70000"),
        ("no such host", 0, "--host"),
        ("::ffff:0:0:1", 0, r"\[::ffff:0:0:1\]:0"),
    ],
)
def test_addresses_that_are_none_of_this_host(host: str, port: int, words: str, tmp_path: Path):
    with pytest.raises(OSError, match=words):
        Service(ranker.build, tmp_path / "none", host=host, port=port).run()


def test_names_that_no_path_can_have(tmp_path: Path):
    with pytest.raises(ValueError, match="'a/b'"):
        Service(ranker.build, tmp_path / "none", name="a/b")


def test_functions_that_no_process_can_import(tmp_path: Path):
    with pytest.raises(ValueError, match="at the top of a module"):
        Service(lambda: ranker.build(), tmp_path / "none")


def starting(folder: Path, model: str, checkpoint: Path) -> "subprocess.Popen[str]":
    folder.mkdir()
    port, grpc_port = free_ports(2)
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    return subprocess.Popen(
        [*COMMAND, model, "--checkpoint", str(checkpoint), *ports],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


@pytest.mark.usefixtures("keeps_process")
@pytest.mark.parametrize(
    ("build", "checkpoint", "words"),
    [
        (ranker.build, "none", r"tables can't be loaded: .*/none"),
        (
            ranker.build_that_raises,
            "v1",
            "ZeroDivisionError: no model today",
        ),
    ],
)
def test_what_can_not_be_served(
    build: Callable[[], nn.Module],
    checkpoint: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    ranker.write_checkpoint(tmp_path, 1)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(RuntimeError, match=words):
        Service(build, tmp_path / checkpoint, port=0, grpc_port=None).run()
    assert not list(temporary.iterdir())
    assert not multiprocessing.active_children()


def test_a_keeper_that_is_killed_while_it_loads(tmp_path: Path):
    keeping = Keeping(ranker.build_that_waits, "none", str(tmp_path / "k"), None, False, None)
    with KeeperProcess(keeping) as keeper:
        [process] = multiprocessing.active_children()
        process.kill()
        with pytest.raises(RuntimeError, match="status -9"):
            until(lambda: keeper.look() is not None)


def test_the_command_says_in_its_last_line_what_is_wrong(tmp_path: Path):
    process = starting(tmp_path / "tmp", "tests.serve.ranker:built", tmp_path / "none")
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    problem = "torchrec-bls serve: module 'tests.serve.ranker' has no function 'built'"
    assert text.strip().splitlines()[-1].startswith(problem)


def test_a_service_that_is_told_to_end_while_tables_are_loaded(tmp_path: Path):
    process = starting(
        tmp_path / "tmp",
        "tests.serve.ranker:build_that_waits",
        ranker.write_checkpoint(tmp_path, 1),
    )
    until(lambda: bool(list((tmp_path / "tmp").iterdir())))
    # The keeper, the zygote, and what cleans up after them.
    until(lambda: len(descendants(process.pid)) >= 3)
    others = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert not list((tmp_path / "tmp").iterdir())
    until(lambda: not any(is_alive(each) for each in others))
