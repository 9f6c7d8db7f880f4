"""The options of RDMA devices: one dataclass, and the environment variables that fill it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_PREFIX = "TORCHREC_BLS_IB_"
_MTUS = (0, 256, 512, 1024, 2048, 4096)
# Smallest and largest value. Some devices take 7 retries for infinite.
_RANGES = {
    "port": (0, 255),
    "gid_index": (-1, 255),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "timeout": (1, 31),
    "retry_count": (0, 6),
    "rnr_retry": (0, 7),
    "min_rnr_timer": (0, 31),
    "inline_bytes": (0, 4096),
}


@dataclass(frozen=True)
class VerbsConfig:
    """How a channel uses an RDMA device. The device's own values are the defaults.

    Each attribute has an environment variable: TORCHREC_BLS_IB_DEVICE=mlx5_0 sets `device`. Ranks
    may have different values. Of two values of `mtu` the smaller one counts.

    Attributes:
        device: name of the device in ibv_devices; empty: the first that has an active port.
        port: number of the port, from 1 on; 0: the first that is active.
        gid_index: index of the port's GID; -1: on RoCE the first that is RoCE v2 and IPv4, else the
            first that is RoCE v2; on InfiniBand none is needed.
        mtu: bytes of a packet, 256 to 4096 in powers of two; 0: the port's MTU.
        traffic_class: traffic class of packets on RoCE, DSCP x 4. It selects the priority in a
            lossless network, where 106 is common.
        service_level: service level of packets on InfiniBand.
        timeout: exponent of the wait for an answer, 4.096 us x 2^timeout (14: 67 ms). Then the
            device asks again.
        retry_count: number of times that the device asks again, before the peer counts as dead.
        rnr_retry: number of times that a message is sent again to a peer that has posted no
            receive; a healthy peer always has one. 7: without end.
        min_rnr_timer: code of the pause before such a repeat (12: 0.64 ms).
        inline_bytes: length up to which messages travel within the request, if the device can.
    """

    device: str = ""
    port: int = 0
    gid_index: int = -1
    mtu: int = 0
    traffic_class: int = 0
    service_level: int = 0
    timeout: int = 14
    retry_count: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    inline_bytes: int = 256

    def __post_init__(self) -> None:
        """Raises ValueError for values that no device takes."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}, but must be from {least} to {most}")
        if self.mtu not in _MTUS:
            raise ValueError(f"mtu is {self.mtu!r}, but must be one of {_MTUS}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "VerbsConfig":
        """Returns the options in the environment variables.

        Raises:
            ValueError: a value is no number or out of range, or a variable names no attribute.
        """
        values: dict[str, Any] = {}
        names = {f"{_PREFIX}{field.name.upper()}": field for field in fields(cls)}
        for variable, text in environment.items():
            if not variable.startswith(_PREFIX):
                continue
            if variable not in names:
                raise ValueError(f"{variable} is set, but there are only {', '.join(names)}")
            field = names[variable]
            try:
                values[field.name] = text if field.type is str else int(text)
            except ValueError as error:
                raise ValueError(f"{variable} is {text!r}, but must be a whole number") from error
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{_PREFIX}*: {error}") from error
