"""Hosts as the doctor sees them: trees of files like those in /sys, /proc and /dev."""

from collections.abc import Mapping, Sequence
from pathlib import Path

UNUSED_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:506b:4bff:fe12:3456"
MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_device(root: Path, name: str, *, index: int = 0, verbs: bool = True) -> Path:
    """Adds an RDMA device on NUMA node 1 and returns its folder in /sys."""
    folder = root / "sys/class/infiniband" / name
    write(folder / "node_type", "1: CA")
    write(folder / "device/numa_node", "1")
    (folder / "ports").mkdir()
    if verbs:
        write(root / f"sys/class/infiniband_verbs/uverbs{index}/ibdev", name)
        write(root / f"dev/infiniband/uverbs{index}", "")
    # Lies beside the devices.
    write(root / "sys/class/infiniband_verbs/abi_version", "6")
    return folder


def add_port(
    device: Path,
    number: int,
    *,
    state: str = "4: ACTIVE",
    link: str = "Ethernet",
    gids: Sequence[tuple[str, str]] = (),
    interface: str = "",
) -> None:
    """Adds a port with the given (address, type) pairs in its table, and one unused entry."""
    port = device / "ports" / str(number)
    write(port / "state", state)
    write(port / "link_layer", link)
    write(port / "rate", "100 Gb/sec (4X EDR)")
    for index, (address, kind) in enumerate([*gids, (UNUSED_GID, "")]):
        write(port / "gids" / str(index), address)
        types = port / "gid_attrs/types" / str(index)
        if kind:
            write(types, kind)
        else:
            types.mkdir(parents=True)  # to read it is an error, as with the real one
        if interface and kind:
            write(port / "gid_attrs/ndevs" / str(index), interface)


def add_roce_device(root: Path, name: str = "mlx5_0", *, mtu: int = 1500) -> Path:
    """Adds a device with one active RoCE port, whose network interface is eth1."""
    folder = add_device(root, name)
    gids = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (MAPPED_IPV4, V1), (MAPPED_IPV4, V2)]
    add_port(folder, 1, gids=gids, interface="eth1")
    write(root / "sys/class/net/eth1/mtu", str(mtu))
    return folder


def add_infiniband_device(root: Path, name: str = "mlx4_0") -> Path:
    """Adds a device with one active InfiniBand port."""
    folder = add_device(root, name)
    add_port(folder, 1, link="InfiniBand", gids=[(LINK_LOCAL, V1)])
    return folder


def add_gpu(root: Path, bus: str, *, lanes: int = 16, model: str = "NVIDIA H100 PCIe") -> None:
    """Adds a GPU with 16 lanes, of which so many are in use, on NUMA node 1."""
    folder = root / "sys/bus/pci/devices" / bus
    write(folder / "vendor", "0x10de")
    write(folder / "class", "0x030200")
    write(folder / "numa_node", "1")
    write(folder / "current_link_width", str(lanes))
    write(folder / "max_link_width", "16")
    write(folder / "current_link_speed", "32.0 GT/s PCIe")
    write(root / "proc/driver/nvidia/gpus" / bus / "information", f"Model: \t\t {model}\nIRQ: 1")


def add_nvidia_driver(root: Path, version: str = "580.159.04") -> None:
    write(
        root / "proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)",
    )


def add_cpus(root: Path, cores: Sequence[str], nodes: Mapping[int, str]) -> None:
    """Adds CPUs 0, 1, ...: for each the list of those of its core, and the CPUs of each node."""
    for cpu, core in enumerate(cores):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", core)
    for node, cpus in nodes.items():
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus)


def add_group(root: Path, lines: str, files: Mapping[str, str]) -> None:
    """Adds the control groups of this process and files below /sys/fs/cgroup."""
    write(root / "proc/self/cgroup", lines)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
