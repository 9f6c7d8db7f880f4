"""Whether other hosts can find this one."""

import socket
import threading

import pytest

from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.host.network import address_of_host_name, interfaces, network_finding

ETH0 = {"eth0": "10.0.0.5"}


@pytest.mark.parametrize(
    ("address", "addresses", "status"),
    [
        ("10.0.0.5", ETH0, Status.OK),
        ("127.0.1.1", ETH0, Status.WARNING),  # how Debian writes /etc/hosts
        ("10.9.9.9", ETH0, Status.WARNING),
        (None, ETH0, Status.WARNING),
        ("127.0.0.1", {}, Status.OK),  # there is no other host
    ],
)
def test_the_name_has_to_stand_for_an_address_of_this_host(
    address: str | None, addresses: dict[str, str], status: Status
) -> None:
    finding = network_finding("node7", address, addresses)
    assert finding.status is status
    if status is Status.WARNING:
        assert "GLOO_SOCKET_IFNAME=eth0 torchrun --local-addr 10.0.0.5" in finding.cure


def test_interfaces_are_those_with_an_address_but_loopback() -> None:
    found = interfaces()
    assert "lo" not in found
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    for address in found.values():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind((address, 0))  # raises for an address of another host


def test_a_name_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: answer.wait(30) and "10.0.0.5")
    assert address_of_host_name(0.05) is None
    answer.set()


def test_a_name_that_stands_for_nothing_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr(socket, "gethostbyname", raise_unknown)
    assert address_of_host_name() is None


def raise_unknown(name: str) -> str:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
