"""The facts from libibverbs beside /sys: whether it can be loaded, and an open device's limits."""

import ctypes
from dataclasses import dataclass

_LIBRARY = "libibverbs.so.1"


@dataclass(frozen=True)
class PortLimits:
    """The limits of a port, from the library.

    Attributes:
        mtu: bytes that a packet carries.
        message_bytes: bytes of the largest message.
    """

    mtu: int
    message_bytes: int


def load_error() -> str:
    """Returns why the library can't be loaded; empty if it can."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return ""


def port_limits(device: str, port: int) -> PortLimits | None:
    """Opens a device and returns a port's limits. It uses pyverbs if that is installed, else the
    package's own wrapper of libibverbs.

    Returns None where the device can't be opened, or the package was built without RDMA.
    """
    try:
        from pyverbs.device import Context
        from pyverbs.pyverbs_error import PyverbsError
    except ImportError:
        return _own_port_limits(device, port)
    try:
        with Context(name=device) as context:
            attributes = context.query_port(port)
            # The library's enumeration counts sizes from 256, which is 1.
            return PortLimits(128 << attributes.active_mtu, attributes.max_msg_sz)
    except PyverbsError:
        return None


def _own_port_limits(device: str, port: int) -> PortLimits | None:
    # Unlike the package, its compiled part needs no torch.
    try:
        from torchrec_bls import _native

        return PortLimits(*_native.port_limits(device, port)) if _native.WITH_VERBS else None
    except (ImportError, RuntimeError):
        return None
