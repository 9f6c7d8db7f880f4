"""Ports that workers share belong to one service."""

import shutil
import socket
from pathlib import Path

import pytest

from tests.serve.running import HOST
from torchrec_bls.serve.places import Places, address, folder_of_sockets, held, shared


def test_workers_share_a_port_that_is_held():
    with held(HOST, 0, "--port") as holder:
        port = holder.getsockname()[1]
        with shared(HOST, port) as one, shared(HOST, port) as other:
            one.listen()
            other.listen()
            with socket.create_connection((HOST, port), timeout=10):
                pass


def test_a_port_that_is_held_is_nobody_else_s():
    """Neither before its workers listen, nor afterwards."""
    with held(HOST, 0, "--port") as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="--port"), held(HOST, port, "--port"):
            pass
        with shared(HOST, port) as worker:
            worker.listen()
            with pytest.raises(OSError, match="--port"), held(HOST, port, "--port"):
                pass
    with held(HOST, port, "--port"):
        pass


def test_a_port_on_which_another_program_listens_with_others():
    """Who asks to share it would get a part of its requests."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"{HOST}:{port}"), held(HOST, port, "--port"):
            pass


def test_a_port_of_connections_that_have_just_ended_is_free():
    with held(HOST, 0, "--port") as holder:
        port = holder.getsockname()[1]
        with shared(HOST, port) as worker:
            worker.listen()
            with socket.create_connection((HOST, port), timeout=10) as caller:
                accepted, _ = worker.accept()
                accepted.close()  # first, so that this end waits
                assert caller.recv(1) == b""
    with held(HOST, port, "--port") as holder, shared(HOST, port):
        assert holder.getsockname()[1] == port


@pytest.mark.parametrize(("front", "most"), [(False, 98), (True, 83)])
def test_a_folder_whose_sockets_have_too_long_names(
    front: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """HAProxy would refuse them, and begin again and again."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    match = f"may have {most}. Set TMPDIR"
    with pytest.raises(ValueError, match=match), folder_of_sockets(10, front=front):
        pass
    assert not list(long.iterdir())
    # What fits can be bound, by HAProxy under a longer name first.
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    with folder_of_sockets(10, front=front) as folder:
        longest = folder.with_name("x" * (most - len("/tmp/")))
    assert not folder.exists()
    longest.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            name = "haproxy.admin" + 10 * "." if front else "10a.http"
            bound.bind(str(longest / name))
    finally:
        shutil.rmtree(longest)


def test_workers_are_found_by_their_names(tmp_path: Path):
    places = Places(tmp_path, HOST, 1, None, front=True)
    for name in ("2b", "1a"):
        places.http(name).touch()
        places.grpc(name).touch()
    assert places.workers() == {name: tmp_path / f"{name}.http" for name in ("1a", "2b")}


def test_addresses():
    assert (address("::1", 8), address(HOST, 8)) == ("[::1]:8", f"{HOST}:8")
