"""Ports that workers share belong to one service."""

import socket
from pathlib import Path

import pytest

from tests.serve.running import HOST
from torchrec_bls.serve.places import Places, address, held, shared


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


def test_workers_are_found_by_their_names(tmp_path: Path):
    places = Places(tmp_path, HOST, 1, None, front=True)
    for name in ("2b", "1a"):
        places.http(name).touch()
        places.grpc(name).touch()
    assert places.workers() == {name: tmp_path / f"{name}.http" for name in ("1a", "2b")}


def test_addresses():
    assert (address("::1", 8), address(HOST, 8)) == ("[::1]:8", f"{HOST}:8")
