"""The network by which the processes of a job find each other: torchrun's store, and gloo."""

import ipaddress
import socket
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.interfaces import ipv4_address


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each network interface that has one, without loopback."""
    addresses = {name: ipv4_address(name) for _, name in socket.if_nameindex()}
    return {
        name: address
        for name, address in addresses.items()
        if address is not None and not ipaddress.ip_address(address).is_loopback
    }


def address_of_host_name(seconds: float = 5.0) -> str | None:
    """Returns the IPv4 address of this host's own name. Returns None if there is none, or if no
    answer comes within `seconds`."""
    found: Future[str] = Future()

    def look_up() -> None:
        # If a name server does not answer, the library waits longer than anybody wants to.
        with suppress(OSError):
            found.set_result(socket.gethostbyname(socket.gethostname()))

    thread = Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(seconds)
    return found.result() if found.done() else None


def network_finding(name: str, address: str | None, addresses: dict[str, str]) -> Finding:
    """Says whether other hosts can reach ranks here by default.

    Args:
        name: name of this host.
        address: address of that name, from `address_of_host_name`.
        addresses: addresses of the interfaces, from `interfaces`.
    """
    facts = {"host_name": name, "host_address": address, "interfaces": addresses}
    listed = ", ".join(f"{interface} {own}" for interface, own in addresses.items())
    text = f"{name} is {address or 'not resolved'}; interfaces: {listed or 'loopback only'}"
    if not addresses or address in addresses.values():
        return Finding("network", Status.OK, text, facts=facts)
    interface, own = next(iter(addresses.items()))
    return Finding(
        "network",
        Status.WARNING,
        f"{text}. Ranks on other hosts can't reach those here by this host's name, which torchrun "
        "and gloo use; within one host that is all right",
        f"Between hosts: GLOO_SOCKET_IFNAME={interface} torchrun --local-addr {own} --rdzv-conf "
        "is_host=... (1 on the endpoint's host, 0 on others), with the interface that leads to "
        "them; or let the name stand for that address in /etc/hosts",
        facts,
    )
