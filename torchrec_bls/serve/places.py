"""Where requests come in."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Of each worker there may be two for a moment, one of which follows the other.
LETTERS = "ab"
# Bytes that the kernel takes for the name of a socket, and those of them that HAProxy needs while
# it binds its own.
_LONGEST, _WHILE_BINDING = 107, 10


@dataclass(frozen=True)
class Places:
    """Addresses of a service, and of its workers.

    Attributes:
        folder: folder of this user alone, with the sockets of all workers.
        host: address that the service listens at.
        port: port for HTTP.
        grpc_port: port for gRPC, or None.
        front: whether a front listens there. Else all workers do.
    """

    folder: Path
    host: str
    port: int
    grpc_port: int | None
    front: bool

    def http(self, name: str) -> Path:
        """Returns the socket at which a worker takes HTTP."""
        return self.folder / f"{name}.http"

    def grpc(self, name: str) -> Path:
        """Returns the socket at which a worker takes gRPC from the front."""
        return self.folder / f"{name}.grpc"

    def workers(self) -> dict[str, Path]:
        """Returns the sockets of all workers by their names, also of those that have ended."""
        return {each.stem: each for each in sorted(self.folder.glob("*.http"))}


@contextmanager
def folder_of_sockets(workers: int, *, front: bool) -> Iterator[Path]:
    """Yields a new folder of this user alone, which is deleted afterwards.

    Args:
        workers: number of workers whose sockets are in it.
        front: whether those of a front are, too.

    Raises:
        ValueError: sockets in it would have too long names.
    """
    with tempfile.TemporaryDirectory(prefix="torchrec-bls-") as name:
        most = _LONGEST - len(f"/{workers}a.http")
        if front:
            most = min(most, _LONGEST - _WHILE_BINDING - len("/haproxy.admin"))
        size = len(os.fsencode(name))
        if size > most:
            raise ValueError(
                f"sockets in {name} would have too long names: it has {size} bytes, but may have "
                f"{most}. Set TMPDIR to a folder with a shorter name"
            )
        yield Path(name)


def address(host: str, port: int) -> str:
    """Returns how a host and a port are written."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def held(host: str, port: int, option: str) -> Iterator[socket.socket]:
    """Yields a socket that keeps others from a port, so that one that is taken is found before all
    else. It does not listen: who connects is refused at once.

    Args:
        host: address.
        port: port; 0 for any.
        option: option of the command that gives another one.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    try:
        # Who shares the port, as workers do, would not notice another service of this user. The
        # holder itself, which does not listen, is in its way for lack of SO_REUSEADDR.
        with _at(host, port, socket.SO_REUSEADDR) as first:
            port = first.getsockname()[1]
        holder = _at(host, port, socket.SO_REUSEPORT)
    except (OSError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or error
        raise OSError(
            f"cannot listen at {address(host, port)}: {cause}. Give another port ({option}), or "
            "address (--host)"
        ) from error
    with holder:
        yield holder


def shared(host: str, port: int) -> socket.socket:
    """Returns a socket of a worker at a port that is held."""
    return _at(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _at(host: str, port: int, *options: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        for option in options:
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made
