"""Addresses of this host's network interfaces."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16  # bytes of an interface's name in the request, with a zero


def ipv4_address(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface, or None if there is none, or no such
    interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack(f"{_NAME_BYTES}s24x", interface.encode()[: _NAME_BYTES - 1])
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return None
    # A sockaddr_in follows the name: family, port, address.
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])
