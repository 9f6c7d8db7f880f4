"""The connections of a channel over TCP: one for each pair of ranks, which both ends have proven.

A rank listens for those of higher numbers and connects to those of lower ones. Who connects shows
by a challenge that it knows the listener's secret, which is told through the group's store alone.
What is not proven within seconds is dropped, while others are served. Only a caller that has proven
all it can waits until the deadline.
"""

import errno
import hmac
import math
import os
import selectors
import socket
import struct
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrec_bls.collective.transport.in_time import TooLateError, within
from torchrec_bls.collective.transport.rank_names import RankNames
from torchrec_bls.errors import RendezvousError
from torchrec_bls.interfaces import ipv4_address
from torchrec_bls.lifetime import kept_from_children

# Seconds for the handshake of a connection, and between tries to connect.
_HANDSHAKE_S, _AGAIN_S = 2.0, 0.05
# Connections that came and whose handshake is under way; of more the oldest is dropped.
_MOST_UNPROVEN = 256

_MAGIC = b"BLS\x01"
_NONCE_BYTES = _PROOF_BYTES = 32
# Magic, rank that connects, and its nonce.
_HELLO = struct.Struct(f"<4sI{_NONCE_BYTES}s")
# The listener's nonce and proof.
_ANSWER = struct.Struct(f"<{_NONCE_BYTES}s{_PROOF_BYTES}s")

# From there on the connection is the channel's.
_WELCOME = b"\x01"

#: A handshake yields how many bytes it has to get, or bytes to send, or None once nobody may give
#: it up. It returns the peer's rank.
Handshake = Generator[int | bytes | None, bytes, int]


class StrangerError(Exception):
    """A connection is not of the rank that it says."""


class Listener:
    """Awaits the connections of higher ranks.

    Args:
        host: address to listen at, of IPv4 or IPv6.

    Attributes:
        record: what the other ranks have to know: `host`, `port` and `secret`.

    Raises:
        OSError: there is no such address here, or no descriptor.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._secret = os.urandom(_PROOF_BYTES)
        self.socket = kept_from_children(
            socket.create_server((host, 0), family=family, backlog=1024)
        )
        self.socket.setblocking(False)
        self.record = {
            "host": host,
            "port": self.socket.getsockname()[1],
            "secret": self._secret.hex(),
        }

    def accept(self, expected: set[int]) -> "_Talk | None":
        """Returns the handshake of the next connection, by one of the expected ranks, if one has
        come."""
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = self.socket.accept()
            return _Talk(connection, accepting(self._secret, expected))
        return None

    def close(self) -> None:
        """Listens no more."""
        self.socket.close()


def accepting(secret: bytes, expected: set[int]) -> Handshake:
    """The listener's side of a handshake.

    Args:
        secret: secret of the listener.
        expected: ranks of which one may connect.

    Raises:
        StrangerError: it is none of them, or does not know the secret.
    """
    hello = yield _HELLO.size
    magic, rank, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or rank not in expected:
        raise StrangerError
    nonce = os.urandom(_NONCE_BYTES)
    yield nonce + _proof(secret, b"listener", hello, nonce)
    shown = yield _PROOF_BYTES
    if not hmac.compare_digest(shown, _proof(secret, b"caller", hello, nonce)):
        raise StrangerError
    yield _WELCOME
    return int(rank)


def connecting(secret: bytes, rank: int, to: int) -> Handshake:
    """The other side.

    Args:
        secret: secret of the listener.
        rank: rank that connects.
        to: rank of the listener.

    Raises:
        StrangerError: who listens does not know the secret.
    """
    hello = _HELLO.pack(_MAGIC, rank, os.urandom(_NONCE_BYTES))
    yield hello
    nonce, shown = _ANSWER.unpack((yield _ANSWER.size))
    if not hmac.compare_digest(shown, _proof(secret, b"listener", hello, nonce)):
        raise StrangerError
    yield _proof(secret, b"caller", hello, nonce)
    yield None  # the listener may have sent its welcome, and listen no more
    if (yield len(_WELCOME)) != _WELCOME:
        raise StrangerError
    return to


def _proof(secret: bytes, whose: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, whose + hello + nonce, "sha256")


class _Talk:
    """A connection whose handshake is under way."""

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        connection.setblocking(False)
        self.socket = kept_from_children(connection)
        self.ends_at = time.monotonic() + _HANDSHAKE_S
        self._handshake = handshake
        self._wanted = next(handshake)
        self._got = b""

    def proven(self) -> int | None:
        """Goes on as far as it can now. Returns the peer's rank once that is proven.

        Raises:
            OSError: the connection has ended.
            StrangerError: see Handshake.
        """
        try:
            while True:
                answer = b""
                if self._wanted is None:
                    self.ends_at = math.inf
                elif isinstance(self._wanted, bytes):
                    # A new connection's buffer has room for it.
                    if self.socket.send(self._wanted) != len(self._wanted):
                        raise StrangerError
                else:
                    # Never more than the handshake: what follows is the channel's.
                    part = self.socket.recv(self._wanted - len(self._got))
                    if not part:
                        raise ConnectionResetError(errno.ECONNRESET, "ended amid the handshake")
                    self._got += part
                    if len(self._got) < self._wanted:
                        continue
                    answer, self._got = self._got, b""
                self._wanted = self._handshake.send(answer)
        except BlockingIOError:
            return None
        except StopIteration as done:
            return int(done.value)


class _Connections:
    """The connections of one rank, as they come."""

    def __init__(
        self, rank: int, listener: Listener, records: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._rank, self._listener, self._records = rank, listener, records
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._missing = set(records)
        self._unproven: dict[_Talk, int | None] = {}  # in their order, and the rank that is called
        self._call_at = {peer: 0.0 for peer in records if peer < rank}
        self.faults: dict[int, str] = {}
        self.made: dict[int, socket.socket] = {}

    @property
    def missing(self) -> list[int]:
        return sorted(self._missing)

    def go_on(self, until: float) -> None:
        """Goes on, until something has happened or the time has come."""
        now = time.monotonic()
        for peer, at in list(self._call_at.items()):
            if at <= now:
                self._call(peer)
        for talk in [each for each in self._unproven if each.ends_at <= now]:
            self._drop(talk, "it did not answer")
        soonest = min([until, *self._call_at.values(), *(t.ends_at for t in self._unproven)])
        for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
            if key.data is None:
                self._accept()
            elif key.data in self._unproven:
                self._advance(key.data)

    def close(self) -> None:
        for talk in list(self._unproven):
            self._drop(talk, "")
        self._selector.close()

    def _accept(self) -> None:
        higher = {peer for peer in self._missing if peer > self._rank}
        while (talk := self._listener.accept(higher)) is not None:
            came = [each for each, called in self._unproven.items() if called is None]
            if len(came) >= _MOST_UNPROVEN:
                self._drop(came[0], "others came after it")
            self._begin(talk, None)

    def _call(self, peer: int) -> None:
        del self._call_at[peer]
        record = self._records[peer]
        family = socket.AF_INET6 if ":" in record["host"] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        failed = connection.connect_ex((record["host"], record["port"]))
        talk = _Talk(connection, connecting(bytes.fromhex(record["secret"]), self._rank, peer))
        self._begin(talk, peer)
        if failed not in (0, errno.EINPROGRESS):
            self._drop(talk, os.strerror(failed))

    def _begin(self, talk: _Talk, called: int | None) -> None:
        self._unproven[talk] = called
        # One that connects is writable once it is connected, and then has something to say.
        events = selectors.EVENT_READ if called is None else selectors.EVENT_WRITE
        self._selector.register(talk.socket, events, talk)

    def _advance(self, talk: _Talk) -> None:
        failed = talk.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            return self._drop(talk, os.strerror(failed))
        try:
            peer = talk.proven()
        except (OSError, StrangerError) as error:
            return self._drop(talk, str(error) or "who listens there is another one")
        if peer is None:
            self._selector.modify(talk.socket, selectors.EVENT_READ, talk)
            return None
        self._end(talk)
        if peer not in self._missing:  # it has called twice
            talk.socket.close()
            return None
        self._missing.discard(peer)
        self.made[peer] = talk.socket
        return None

    def _drop(self, talk: _Talk, why: str) -> None:
        called = self._unproven[talk]
        self._end(talk)
        talk.socket.close()
        if called is not None and called in self._missing:
            self.faults[called] = why
            self._call_at[called] = time.monotonic() + _AGAIN_S

    def _end(self, talk: _Talk) -> None:
        self._selector.unregister(talk.socket)
        del self._unproven[talk]


def connected(
    rank: int,
    listener: Listener,
    records: Mapping[int, Mapping[str, Any]],
    deadline: float,
    names: RankNames,
) -> dict[int, socket.socket]:
    """Connects a rank with others, which do the same.

    Args:
        rank: this rank.
        listener: its listener, which is closed.
        records: `Listener.record` of each of the others, by rank.
        deadline: seconds that it may take.
        names: names of the ranks.

    Returns:
        A connection for each of the others, by rank.

    Raises:
        RendezvousError: some did not connect; the text names them and the cure.
    """
    end = time.monotonic() + deadline
    connections = _Connections(rank, listener, records)
    try:
        while connections.missing and time.monotonic() < end:
            connections.go_on(end)
        if connections.missing:
            raise RendezvousError(_missing(rank, connections, records, deadline, names))
        return connections.made
    except BaseException:
        for made in connections.made.values():
            made.close()
        raise
    finally:
        connections.close()
        listener.close()


def _missing(
    rank: int,
    connections: _Connections,
    records: Mapping[int, Mapping[str, Any]],
    deadline: float,
    names: RankNames,
) -> str:
    told = "; ".join(
        f"{names.of(peer)} at {records[peer]['host']} port {records[peer]['port']}"
        + (f" ({connections.faults[peer]})" if peer in connections.faults else "")
        if peer < rank
        else f"{names.of(peer)}, which had to call this rank"
        for peer in connections.missing
    )
    return (
        f"no connection over TCP within {deadline:g} s: {told}. Let the hosts reach each other at "
        "any port, and name the network interface between them by GLOO_SOCKET_IFNAME"
    )


def own_address(is_one_host: bool, deadline: float) -> str:
    """Returns the address at which other ranks reach this one: that of the interface in
    GLOO_SOCKET_IFNAME, or else that of this host's name, as for torch's gloo.

    Args:
        is_one_host: whether all of them are on this host.
        deadline: seconds that a name server may take.

    Raises:
        OSError: there is no such interface, or it has no address; or other hosts can't know this
            one by its name.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _address_of_interface(name)
    if is_one_host:
        return "127.0.0.1"
    host = socket.gethostname()
    try:
        found = within(deadline, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except socket.gaierror:
        found = []
    except TooLateError:
        raise OSError(
            errno.ETIMEDOUT,
            f"no name server told the address of this host's name, {host}, within {deadline:g} s: "
            "name the network interface by GLOO_SOCKET_IFNAME",
        ) from None
    for *_, address in found:
        if not str(address[0]).startswith(("127.", "::1", "fe80")):
            return str(address[0])
    raise OSError(
        errno.EADDRNOTAVAIL,
        f"this host's name, {host}, stands for no address that other hosts can reach: name the "
        "network interface by GLOO_SOCKET_IFNAME",
    )


def _address_of_interface(name: str) -> str:
    address = ipv4_address(name)
    if address is not None:
        return address
    with suppress(OSError):  # there is no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, interface = line.split()
            if interface == name and scope == "00":  # global
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise OSError(
        errno.EADDRNOTAVAIL,
        f"GLOO_SOCKET_IFNAME names the interface '{name}', which has no address here: `ip address` "
        "lists those that have one",
    )
