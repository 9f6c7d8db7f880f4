"""What libibverbs adds to /sys: whether it is there, and the limits it tells of an open device."""

import ctypes
from dataclasses import dataclass

_LIBRARY = "libibverbs.so.1"


@dataclass(frozen=True)
class PortLimits:
    """What a port allows, as the library tells it.

    Attributes:
        mtu: bytes a packet carries.
        message_bytes: of the largest message.
    """

    mtu: int
    message_bytes: int


def load_error() -> str:
    """Returns why the library can't be loaded, empty if it can."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return ""


def port_limits(device: str, port: int) -> PortLimits | None:
    """Asks an open device for a port's limits, by pyverbs.

    Returns None where pyverbs isn't installed or the device can't be opened. The one place that
    opens a device: a wrapper of libibverbs of this package's own would be asked here.
    """
    try:
        from pyverbs.device import Context
        from pyverbs.pyverbs_error import PyverbsError
    except ImportError:
        return None
    try:
        with Context(name=device) as context:
            attributes = context.query_port(port)
            # The library's enumeration counts sizes from 256 = 1 on.
            return PortLimits(128 << attributes.active_mtu, attributes.max_msg_sz)
    except PyverbsError:
        return None
