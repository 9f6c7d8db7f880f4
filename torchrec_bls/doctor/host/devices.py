"""RDMA devices as /sys shows them. Reading them needs no library and no permission."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_bls.doctor.host.sysfs import numbered, read

# InfiniBand's packet sizes, and the bytes that RoCE puts around a packet (the kernel's
# iboe_get_mtu).
_MTUS = (4096, 2048, 1024, 512, 256)
_ROCE_HEADERS = 96

_ROCE_V2 = "RoCE v2"
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True)
class Gid:
    """An address of a port.

    Attributes:
        index: index in the port's table.
        address: address in eight groups of four digits, as /sys writes it.
        kind: "IB/RoCE v1" or "RoCE v2".
        interface: interface of the network that a RoCE address belongs to, else "".
    """

    index: int
    address: str
    kind: str
    interface: str


@dataclass(frozen=True)
class Port:
    """A port of a device.

    Attributes:
        number: number of the port, counted from 1.
        state: "ACTIVE", "DOWN" and the like.
        link: "Ethernet" (RoCE) or "InfiniBand".
        rate: rate in the driver's words.
        interface: interface of the network, with RoCE; "" where /sys does not tell.
        gids: addresses that are in use.
        mtu: bytes that a packet carries; None where /sys does not tell.
    """

    number: int
    state: str
    link: str
    rate: str
    interface: str
    gids: tuple[Gid, ...]
    mtu: int | None

    @property
    def active(self) -> bool:
        """Returns whether the link is up."""
        return self.state == "ACTIVE"

    def best_gid(self) -> Gid | None:
        """Returns the address to use. With RoCE that is an IPv4 one of version 2, which is
        routed."""
        if self.link == "InfiniBand":
            return next(iter(self.gids), None)
        routed = [gid for gid in self.gids if gid.kind == _ROCE_V2]
        mapped = [gid for gid in routed if gid.address.startswith(_IPV4_MAPPED)]
        return next(iter([*mapped, *routed]), None)


@dataclass(frozen=True)
class Device:
    """An RDMA device.

    Attributes:
        name: name in /sys/class/infiniband.
        verbs_file: file that a process opens to use it; None where the kernel offers none.
        numa_node: NUMA node of the device; None where that is unknown.
        ports: ports by number.
    """

    name: str
    verbs_file: Path | None
    numa_node: int | None
    ports: tuple[Port, ...]


def find_devices(root: Path) -> list[Device]:
    """Returns the RDMA devices of a host, by name.

    Args:
        root: root of the file system, for /sys and /dev.
    """
    try:
        folders = sorted((root / "sys/class/infiniband").iterdir())
    except OSError:
        return []
    return [_device(root, folder) for folder in folders]


def _device(root: Path, folder: Path) -> Device:
    verbs = [
        entry.name
        for entry in numbered(root / "sys/class/infiniband_verbs", "uverbs")
        if read(entry / "ibdev") == folder.name
    ]
    node = read(folder / "device/numa_node")
    return Device(
        name=folder.name,
        verbs_file=root / "dev/infiniband" / verbs[0] if verbs else None,
        numa_node=int(node) if node is not None and node.isdecimal() else None,
        ports=tuple(_port(root, port) for port in numbered(folder / "ports")),
    )


def _port(root: Path, folder: Path) -> Port:
    gids = tuple(_gids(folder))
    link = read(folder / "link_layer") or ""
    interface = _interface(folder, gids) if link == "Ethernet" else ""
    return Port(
        number=int(folder.name),
        # "4: ACTIVE"
        state=(read(folder / "state") or "").partition(": ")[2],
        link=link,
        rate=read(folder / "rate") or "",
        interface=interface,
        gids=gids,
        mtu=_roce_mtu(root, interface) if interface else None,
    )


def _interface(port: Path, gids: Sequence[Gid]) -> str:
    """Returns the network interface of a port: that of its addresses, or else that of the
    device."""
    device = port.parents[1]
    try:
        of_function = [path.name for path in (device / "device/net").iterdir()]
    except OSError:
        of_function = []  # for a software device, which names its parent
    found = [gid.interface for gid in gids] + [read(device / "parent") or ""]
    if len(of_function) == 1:
        found += of_function
    return next(filter(None, found), "")


def _gids(port: Path) -> list[Gid]:
    gids = []
    for entry in numbered(port / "gids"):
        address = read(entry) or ""
        if address.strip("0:"):
            kind = read(port / "gid_attrs/types" / entry.name) or ""
            interface = read(port / "gid_attrs/ndevs" / entry.name) or ""
            gids.append(Gid(int(entry.name), address, kind, interface))
    return gids


def _roce_mtu(root: Path, interface: str) -> int | None:
    """Returns the bytes that the Ethernet interface's own MTU leaves for a packet."""
    mtu = read(root / "sys/class/net" / interface / "mtu")
    if mtu is None:
        return None
    return next((size for size in _MTUS if size <= int(mtu) - _ROCE_HEADERS), None)
