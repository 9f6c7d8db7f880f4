"""Sockets that a library opens and does not give out, for forked children to close.

A child inherits them. As long as it lives, the other ends do not notice the end of its parent.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def tcp_sockets() -> dict[int, str]:
    """Returns the identity of each TCP socket of this process, by descriptor."""
    identities = {fd: identity_of(fd) for fd in (int(path.name) for path in _DESCRIPTORS.iterdir())}
    return {fd: identity for fd, identity in identities.items() if identity and _is_tcp(fd)}


def close_sockets(identities: Mapping[int, str]) -> None:
    """Closes the sockets that are still the ones that `tcp_sockets` found."""
    for fd, identity in identities.items():
        if identity_of(fd) == identity:
            os.close(fd)


def identity_of(fd: int) -> str:
    """Returns an identity that no other socket of this host has; empty if it is no socket."""
    with suppress(OSError):  # closed meanwhile
        target = str((_DESCRIPTORS / str(fd)).readlink())
        return target if target.startswith("socket:") else ""
    return ""


def _is_tcp(fd: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as opened:
        internet = opened.family in (socket.AF_INET, socket.AF_INET6)
        return internet and opened.type == socket.SOCK_STREAM
    return False
