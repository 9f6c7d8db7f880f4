"""Whether RDMA devices can be used. Channels between hosts need them."""

import os
from collections.abc import Callable, Sequence

from torchrec_bls.doctor import library
from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.devices import Device, Port


def rdma_findings(
    devices: Sequence[Device],
    load_error: Callable[[], str] = library.load_error,
    port_limits: Callable[[str, int], library.PortLimits | None] = library.port_limits,
) -> list[Finding]:
    """Describes every device and port, and says what keeps it from being used.

    No finding is a problem: ranks of one host need no device.

    Args:
        devices: devices of this host.
        load_error: function that returns why libibverbs can't be loaded, or "".
        port_limits: function that returns the limits of a port, or None where they are unknown.
    """
    if not devices:
        text = "no device: channels between hosts go over TCP (transport tcp)"
        return [Finding("RDMA", Status.OK, text, facts={"devices": 0})]
    any_active = any(port.active for device in devices for port in device.ports)
    findings = [_library_finding(load_error())]
    for device in devices:
        findings.append(_device_finding(device))
        findings += [_port_finding(device, port, any_active, port_limits) for port in device.ports]
    return findings


def why_not_tried(findings: Sequence[Finding]) -> str:
    """Returns why no device is worth a self-test; empty if one is.

    Args:
        findings: findings of rdma_findings, and any others.
    """
    facts = [finding.facts for finding in findings]
    if any(fact.get("devices") == 0 for fact in facts):
        return "no device"
    if any(fact.get("loads") is False for fact in facts):
        return "libibverbs can't be loaded"
    openable = {fact["device"] for fact in facts if fact.get("openable")}
    active = {fact["device"] for fact in facts if fact.get("state") == "ACTIVE"}
    return "" if openable & active else "no device can be opened and has an active port"


def _library_finding(error: str) -> Finding:
    if not error:
        return Finding("libibverbs", Status.OK, "loads", facts={"loads": True})
    return Finding(
        "libibverbs",
        Status.WARNING,
        f"can't be loaded: {error}",
        "apt-get install libibverbs1 ibverbs-providers (RHEL: dnf install libibverbs)",
        {"loads": False},
    )


def _device_finding(device: Device) -> Finding:
    facts = {
        "device": device.name,
        "numa_node": device.numa_node,
        "verbs_file": None if device.verbs_file is None else str(device.verbs_file),
        "openable": False,
    }
    text = f"{len(device.ports)} port{'s' * (len(device.ports) != 1)}"
    if device.numa_node is not None:
        text += f", NUMA node {device.numa_node}"
    if device.verbs_file is None:
        text += "; the kernel offers no file to use it by"
        return Finding(device.name, Status.WARNING, text, "As root: modprobe ib_uverbs", facts)
    try:
        os.close(os.open(device.verbs_file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        text += f"; {device.verbs_file} can't be opened: {error.strerror}"
        return Finding(device.name, Status.WARNING, text, _open_cure(error), facts)
    text += f", {device.verbs_file} can be opened"
    return Finding(device.name, Status.OK, text, facts=facts | {"openable": True})


def _open_cure(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "In a container: docker run --device /dev/infiniband; elsewhere udev makes the file"
    if isinstance(error, PermissionError):
        return (
            f"chmod 666 {error.filename}, as rdma-core's udev rules do, or join the group that "
            "owns it; in a container: docker run --device /dev/infiniband"
        )
    return "dmesg may tell why the driver refuses"


def _port_finding(
    device: Device,
    port: Port,
    any_active: bool,
    port_limits: Callable[[str, int], library.PortLimits | None],
) -> Finding:
    subject = f"{device.name} port {port.number}"
    limits = port_limits(device.name, port.number) if port.active else None
    mtu = port.mtu if limits is None else limits.mtu
    gid = port.best_gid()
    facts = {
        "device": device.name,
        "port": port.number,
        "state": port.state,
        "link": port.link,
        "rate": port.rate,
        "interface": port.interface,
        "mtu_bytes": mtu,
        "largest_message_bytes": None if limits is None else limits.message_bytes,
        "gid_index": None if gid is None else gid.index,
        "gids": [
            {"index": g.index, "gid": g.address, "type": g.kind, "interface": g.interface}
            for g in port.gids
        ],
    }
    text = f"{port.state or 'state unknown'}, {port.link or 'link unknown'}"
    if port.interface:
        text += f" ({port.interface})"
    if not port.active:
        # Many devices have a second port without a cable.
        status = Status.OK if any_active else Status.WARNING
        cure = "" if any_active else _link_cure(port)
        return Finding(subject, status, text, cure, facts)
    text += f", {port.rate}, MTU {mtu if mtu is not None else 'unknown'}"
    if gid is None:
        return Finding(subject, Status.WARNING, f"{text}; no usable GID", _gid_cure(port), facts)
    text += f", GID {gid.index} of {len(port.gids)}: {gid.address}"
    if port.link == "Ethernet":
        text += f" ({gid.kind})"
    return Finding(subject, Status.OK, text, facts=facts)


def _link_cure(port: Port) -> str:
    if port.link == "InfiniBand":
        return "Check the cable and that a subnet manager runs (opensm; sminfo)"
    return f"Check the cable, and bring the interface up: ip link set {_interface(port)} up"


def _gid_cure(port: Port) -> str:
    if port.link == "InfiniBand":
        return "A subnet manager gives a port its GID: check that one runs (opensm; sminfo)"
    return (
        "RoCE v2 takes its GIDs from the interface's addresses: give it an IPv4 address "
        f"(ip address add ADDRESS/PREFIX dev {_interface(port)})"
    )


def _interface(port: Port) -> str:
    return port.interface or "INTERFACE"
