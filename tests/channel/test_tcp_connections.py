"""Connections of ranks over TCP: who proves what, and what becomes of strangers."""

import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.collective.transport import tcp_connections
from torchrec_bls.collective.transport.rank_names import RankNames
from torchrec_bls.collective.transport.tcp_connections import (
    Listener,
    StrangerError,
    accepting,
    connected,
    connecting,
    own_address,
)
from torchrec_bls.errors import RendezvousError

SECRET, OTHER = b"s" * 32, b"o" * 32


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: here is no channel."""


def joined(listeners: list[Listener], deadline: float = 30.0) -> list[Any]:
    """Connects ranks that are threads; returns what each got or raised."""
    records = [listener.record for listener in listeners]
    results: list[Any] = [None] * len(listeners)

    def connect(rank: int) -> None:
        others = {peer: each for peer, each in enumerate(records) if peer != rank}
        try:
            results[rank] = connected(
                rank, listeners[rank], others, deadline, RankNames(range(len(records)))
            )
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_each_pair_of_ranks_has_a_connection(host: str) -> None:
    results = joined([Listener(host) for _ in range(4)])
    with ExitStack() as stack:
        for connections in results:
            for each in connections.values():
                stack.enter_context(each).setblocking(True)
        for rank, connections in enumerate(results):
            assert sorted(connections) == [peer for peer in range(4) if peer != rank]
            for peer, each in connections.items():
                each.sendall(struct.pack("<II", rank, peer))
        for rank, connections in enumerate(results):
            for peer, each in connections.items():
                assert struct.unpack("<II", each.recv(8)) == (peer, rank)


def test_strangers_do_not_keep_ranks_from_each_other() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:  # both ends of all of them are here
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        address = ("127.0.0.1", listeners[0].record["port"])
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(1000)]
        results = joined(listeners)
        for connections in results:
            for each in connections.values():
                stack.enter_context(each)
            assert len(connections) == 1
        for each in silent:  # all of them are dropped
            each.settimeout(10)
            assert each.recv(1) == b""


def test_a_silent_stranger_is_dropped_while_others_are_awaited() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    records = [listener.record for listener in listeners]
    names = RankNames(range(2))
    made: list[socket.socket] = []

    def await_the_other() -> None:
        made.extend(connected(0, listeners[0], {1: records[1]}, 60.0, names).values())

    waiting = threading.Thread(target=await_the_other)
    waiting.start()
    with socket.create_connection(("127.0.0.1", records[0]["port"]), timeout=30) as stranger:
        assert stranger.recv(1) == b""
    assert waiting.is_alive()
    made.extend(connected(1, listeners[1], {0: records[0]}, 60.0, names).values())
    waiting.join()
    assert len(made) == 2
    for each in made:
        each.close()


def test_a_welcome_that_comes_late_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends it listens no more: a caller that gave up would call nobody."""
    monkeypatch.setattr(tcp_connections, "_HANDSHAKE_S", 0.2)
    # Five strangers are then as many too many as 259 would be.
    monkeypatch.setattr(tcp_connections, "_MOST_UNPROVEN", 2)
    listener, caller = Listener("127.0.0.1"), Listener("127.0.0.1")
    listener.socket.setblocking(True)
    made: list[socket.socket] = []

    def call() -> None:
        records = {0: listener.record}
        made.extend(connected(1, caller, records, 30.0, RankNames(range(2))).values())

    calling = threading.Thread(target=call)
    calling.start()
    connection, _ = listener.socket.accept()
    listener.close()
    with connection, ExitStack() as stack:
        handshake = accepting(bytes.fromhex(listener.record["secret"]), {1})
        sent = handshake.send(connection.recv(next(handshake), socket.MSG_WAITALL))
        connection.sendall(sent)
        welcome = handshake.send(connection.recv(handshake.send(b""), socket.MSG_WAITALL))
        address = ("127.0.0.1", caller.record["port"])
        for _ in range(5):  # strangers that call the caller
            stack.enter_context(socket.create_connection(address))
        time.sleep(1)
        connection.sendall(welcome)
        calling.join()
        [own] = made
        with own:
            own.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_a_rank_that_does_not_call_is_named() -> None:
    listener = Listener("127.0.0.1")
    with pytest.raises(RendezvousError, match="rank 1, which had to call this rank"):
        connected(0, listener, {1: listener.record}, 0.1, RankNames(range(2)))


def talk(one: Iterator[Any], other: Iterator[Any]) -> tuple[int, int]:
    """Lets two sides of a handshake talk; returns what both return."""
    returned: dict[int, int] = {}
    sides: list[Any] = [one, other]
    heard, wanted = [b"", b""], [next(one), next(other)]
    while len(returned) < 2:
        for me in (0, 1):
            try:
                while me not in returned:
                    if wanted[me] is None:
                        wanted[me] = sides[me].send(b"")
                    elif isinstance(wanted[me], bytes):
                        heard[1 - me] += wanted[me]
                        wanted[me] = sides[me].send(b"")
                    elif len(heard[me]) >= wanted[me]:
                        part, heard[me] = heard[me][: wanted[me]], heard[me][wanted[me] :]
                        wanted[me] = sides[me].send(part)
                    else:
                        break
            except StopIteration as done:
                returned[me] = done.value
    return returned[0], returned[1]


def test_who_knows_the_secret_is_connected() -> None:
    assert talk(accepting(SECRET, {3, 4}), connecting(SECRET, 4, 0)) == (4, 0)


def test_who_does_not_is_not() -> None:
    with pytest.raises(StrangerError):
        talk(accepting(SECRET, {4}), connecting(OTHER, 4, 0))
    with pytest.raises(StrangerError):
        talk(accepting(SECRET, {3}), connecting(SECRET, 4, 0))


@given(st.binary(min_size=40, max_size=40), st.binary(min_size=32, max_size=32))
def test_no_bytes_prove_anything(hello: bytes, shown: bytes) -> None:
    handshake = accepting(SECRET, {0, 1, 2})
    assert next(handshake) == 40
    for each in (hello, b"BLS\x01" + struct.pack("<I", 1) + hello[8:]):
        handshake = accepting(SECRET, {0, 1, 2})
        next(handshake)
        with pytest.raises(StrangerError):
            handshake.send(each)
            handshake.send(b"")
            handshake.send(shown)


def test_an_answer_of_another_connection_proves_nothing() -> None:
    """Who has heard a handshake can't repeat it: each has numbers of its own."""
    caller, listener = connecting(SECRET, 1, 0), accepting(SECRET, {1})
    next(listener)
    heard = listener.send(next(caller))
    caller.send(b"")
    proof = caller.send(heard)
    again = accepting(SECRET, {1})
    next(again)
    again.send(b"BLS\x01" + struct.pack("<I", 1) + b"n" * 32)
    again.send(b"")
    with pytest.raises(StrangerError):
        again.send(proof)


def test_a_peer_that_can_not_be_reached_is_named() -> None:
    listener, gone = Listener("127.0.0.1"), Listener("127.0.0.1")
    gone.close()
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 0 at 127.0.0.1 port \d+ \(.*refused.*IFNAME"):
        connected(1, listener, {0: gone.record}, 2.0, RankNames(range(2)))
    assert time.monotonic() - began >= 2.0


def test_another_program_at_the_port_is_named() -> None:
    listener, other = Listener("127.0.0.1"), Listener("127.0.0.1")
    record = {**listener.record, "secret": OTHER.hex()}
    results: list[BaseException] = []

    def listen() -> None:
        try:
            connected(0, listener, {1: other.record}, 4.0, RankNames(range(2)))
        except RendezvousError as error:
            results.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises(RendezvousError, match="who listens there is another one"):
        connected(1, other, {0: record}, 3.0, RankNames(range(2)))
    thread.join()
    assert results


def test_nothing_stays_open_after_a_failure() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    listener, gone = Listener("127.0.0.1"), Listener("127.0.0.1")
    gone.close()
    with pytest.raises(RendezvousError):
        connected(1, listener, {0: gone.record, 2: gone.record}, 0.2, RankNames(range(3)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_address_is_that_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address(False, 30.0) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(OSError, match="'none0', which has no address"):
        own_address(True, 30.0)


def test_the_address_is_that_of_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address(True, 30.0) == "127.0.0.1"
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(tcp_connections.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(OSError, match="stands for no address"):
        own_address(False, 30.0)
    found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0)))
    assert own_address(False, 30.0) == "10.1.2.3"


def test_a_name_that_stands_for_nothing_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(tcp_connections.socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr(tcp_connections.socket, "getaddrinfo", raise_unknown)
    with pytest.raises(OSError, match=r"no-such-host\.invalid, stands for no .*GLOO_SOCKET"):
        own_address(False, 30.0)


def raise_unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    answer = threading.Event()
    monkeypatch.setattr(tcp_connections.socket, "getaddrinfo", lambda *_, **__: answer.wait(30))
    with pytest.raises(OSError, match=r"within 0.05 s: name the network interface by GLOO_SOCKET"):
        own_address(False, 0.05)
    answer.set()
