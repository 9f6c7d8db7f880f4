"""What is said of RDMA devices, on trees of files."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.doctor.host_tree import (
    LINK_LOCAL,
    MAPPED_IPV4,
    V1,
    V2,
    add_device,
    add_infiniband_device,
    add_port,
    add_roce_device,
    write,
)
from torchrec_bls import _native
from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.devices import find_devices
from torchrec_bls.doctor.host.rdma import rdma_findings, why_not_tried
from torchrec_bls.doctor.library import PortLimits, load_error, port_limits
from torchrec_bls.errors import RendezvousError


def findings(root: Path, error: str = "", limits: PortLimits | None = None) -> dict[str, Finding]:
    """Returns the findings by subject, with a library that loads and tells `limits`."""
    found = rdma_findings(find_devices(root), lambda: error, lambda device, port: limits)
    return {finding.subject: finding for finding in found}


def test_a_host_without_devices_is_well(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path).values()
    assert finding.status is Status.OK
    assert finding.text == "no device: channels between hosts go over TCP (transport tcp)"


def test_a_roce_port_tells_its_routed_ipv4_address(tmp_path: Path) -> None:
    add_roce_device(tmp_path)
    found = findings(tmp_path)
    assert [finding.status for finding in found.values()] == [Status.OK] * 3
    assert found["mlx5_0"].text == (
        f"1 port, NUMA node 1, {tmp_path}/dev/infiniband/uverbs0 can be opened"
    )
    port = found["mlx5_0 port 1"]
    assert port.text == (
        "ACTIVE, Ethernet (eth1), 100 Gb/sec (4X EDR), MTU 1024, "
        f"GID 3 of 4: {MAPPED_IPV4} (RoCE v2)"
    )
    assert port.facts["gid_index"] == 3
    assert port.facts["gids"][0] == {
        "index": 0,
        "gid": LINK_LOCAL,
        "type": V1,
        "interface": "eth1",
    }


@pytest.mark.parametrize(("interface", "packet"), [(1500, 1024), (4191, 2048), (4192, 4096)])
def test_a_roce_packet_is_what_the_interface_leaves(
    tmp_path: Path, interface: int, packet: int
) -> None:
    add_roce_device(tmp_path, mtu=interface)
    assert findings(tmp_path)["mlx5_0 port 1"].facts["mtu_bytes"] == packet


@pytest.mark.parametrize(
    ("file", "text", "cure"),
    [
        ("parent", "veth0", "ip link set veth0 up"),  # as rdma_rxe writes it
        ("device/net/eth2/mtu", "9000", "ip link set eth2 up"),
        ("fw_ver", "16.35", "ip link set INTERFACE up"),
    ],
)
def test_the_interface_to_bring_up_is_named(
    tmp_path: Path, file: str, text: str, cure: str
) -> None:
    device = add_device(tmp_path, "rxe0")
    add_port(device, 1, state="1: DOWN")
    write(device / file, text)
    assert findings(tmp_path)["rxe0 port 1"].cure.endswith(cure)


def test_of_two_interfaces_none_is_guessed(tmp_path: Path) -> None:
    device = add_device(tmp_path, "mlx4_0")
    add_port(device, 1, state="1: DOWN")
    write(device / "device/net/eth2/mtu", "9000")
    write(device / "device/net/eth3/mtu", "9000")
    assert findings(tmp_path)["mlx4_0 port 1"].facts["interface"] == ""


def test_an_infiniband_port_needs_no_type_of_its_address(tmp_path: Path) -> None:
    add_infiniband_device(tmp_path)
    port = findings(tmp_path)["mlx4_0 port 1"]
    assert port.status is Status.OK
    assert port.facts["gid_index"] == 0
    assert "InfiniBand" in port.text
    assert "MTU unknown" in port.text


def test_the_library_tells_what_sys_does_not(tmp_path: Path) -> None:
    add_infiniband_device(tmp_path)
    port = findings(tmp_path, limits=PortLimits(2048, 1 << 30))["mlx4_0 port 1"]
    assert "MTU 2048" in port.text
    assert port.facts["largest_message_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("link", "cure"), [("Ethernet", "ip link set"), ("InfiniBand", "subnet manager")]
)
def test_a_link_that_is_down_is_a_warning(tmp_path: Path, link: str, cure: str) -> None:
    add_port(add_device(tmp_path, "mlx5_0"), 1, state="1: DOWN", link=link)
    port = findings(tmp_path)["mlx5_0 port 1"]
    assert port.status is Status.WARNING
    assert port.text == f"DOWN, {link}"
    assert cure in port.cure


def test_a_second_port_may_be_down(tmp_path: Path) -> None:
    add_port(add_roce_device(tmp_path), 2, state="1: DOWN")
    port = findings(tmp_path)["mlx5_0 port 2"]
    assert (port.status, port.text, port.cure) == (Status.OK, "DOWN, Ethernet", "")


@pytest.mark.parametrize("gids", [[], [(LINK_LOCAL, V1)]])
def test_a_roce_port_without_a_routed_address_is_a_warning(
    tmp_path: Path, gids: list[tuple[str, str]]
) -> None:
    add_port(add_device(tmp_path, "rxe0"), 1, gids=gids)
    port = findings(tmp_path)["rxe0 port 1"]
    assert port.status is Status.WARNING
    assert port.text.endswith("no usable GID")
    assert "ip address add" in port.cure


def test_a_routed_address_that_is_no_ipv4_one_will_do(tmp_path: Path) -> None:
    add_port(add_device(tmp_path, "rxe0"), 1, gids=[(LINK_LOCAL, V1), (LINK_LOCAL, V2)])
    assert findings(tmp_path)["rxe0 port 1"].facts["gid_index"] == 1


def test_an_infiniband_port_without_an_address_is_a_warning(tmp_path: Path) -> None:
    add_port(add_device(tmp_path, "mlx4_0"), 1, link="InfiniBand")
    assert "subnet manager" in findings(tmp_path)["mlx4_0 port 1"].cure


def test_a_missing_library_is_a_warning_with_its_package(tmp_path: Path) -> None:
    add_roce_device(tmp_path)
    finding = findings(tmp_path, error="libibverbs.so.1: no such file")["libibverbs"]
    assert finding.status is Status.WARNING
    assert "no such file" in finding.text
    assert "apt-get install libibverbs1" in finding.cure


def test_devices_are_told_in_order_each_with_its_own_file(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_1", index=10)
    add_device(tmp_path, "mlx5_0", index=2)
    devices = find_devices(tmp_path)
    assert [(device.name, device.verbs_file) for device in devices] == [
        ("mlx5_0", tmp_path / "dev/infiniband/uverbs2"),
        ("mlx5_1", tmp_path / "dev/infiniband/uverbs10"),
    ]


def test_a_device_without_uverbs_names_the_module(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", verbs=False)
    device = findings(tmp_path)["mlx5_0"]
    assert device.status is Status.WARNING
    assert "modprobe ib_uverbs" in device.cure


def test_a_container_without_the_file_names_the_option(tmp_path: Path) -> None:
    add_roce_device(tmp_path)
    shutil.rmtree(tmp_path / "dev")
    device = findings(tmp_path)["mlx5_0"]
    assert device.status is Status.WARNING
    assert "--device /dev/infiniband" in device.cure
    assert device.facts["openable"] is False


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("closed", ["dev/infiniband/uverbs0", "dev/infiniband"])
def test_no_permission_is_a_warning_with_its_cure(readable_by_all: Path, closed: str) -> None:
    add_roce_device(readable_by_all)
    (readable_by_all / closed).chmod(0)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:  # root may open everything
        if os.getuid() == 0:
            os.setuid(65534)
        device = findings(readable_by_all)["mlx5_0"]
        os.write(sending, f"{device.status.value}\n{device.text}\n{device.cure}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    status, text, cure = os.read(receiving, 1 << 16).decode().split("\n")
    os.close(receiving)
    os.close(sending)
    assert status == "warning"
    assert text.endswith("uverbs0 can't be opened: Permission denied")
    assert cure.startswith(f"chmod 666 {readable_by_all}/dev/infiniband/uverbs0")


def tried(root: Path, error: str = "") -> str:
    return why_not_tried(list(findings(root, error).values()))


def test_a_device_that_can_be_opened_and_has_a_link_is_tried(tmp_path: Path) -> None:
    assert tried(tmp_path) == "no device"
    add_port(add_device(tmp_path, "mlx5_1", index=1), 1, state="1: DOWN")
    assert tried(tmp_path) == "no device can be opened and has an active port"
    add_roce_device(tmp_path)
    assert tried(tmp_path) == ""
    assert tried(tmp_path, error="no such file") == "libibverbs can't be loaded"
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert tried(tmp_path) == "no device can be opened and has an active port"


class FakePyverbsError(Exception):
    pass


class FakeContext:
    """pyverbs' Context of a device with one port of the largest MTU."""

    def __init__(self, name: str) -> None:
        if name != "mlx5_0":
            raise FakePyverbsError(f"Failed to open device {name}")

    def __enter__(self) -> "FakeContext":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query_port(self, port: int) -> Any:
        assert port == 1
        attributes = ModuleType("attributes")
        attributes.active_mtu = 5
        attributes.max_msg_sz = 1 << 31
        return attributes


def test_pyverbs_is_asked_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, errors = ModuleType("pyverbs.device"), ModuleType("pyverbs.pyverbs_error")
    device.Context = FakeContext
    errors.PyverbsError = FakePyverbsError
    monkeypatch.setitem(sys.modules, "pyverbs", ModuleType("pyverbs"))
    monkeypatch.setitem(sys.modules, "pyverbs.device", device)
    monkeypatch.setitem(sys.modules, "pyverbs.pyverbs_error", errors)
    assert port_limits("mlx5_0", 1) == PortLimits(4096, 1 << 31)
    assert port_limits("mlx5_1", 1) is None


@pytest.mark.parametrize(
    ("with_verbs", "answer", "expected"),
    [
        (True, {"return_value": (2048, 1 << 30)}, PortLimits(2048, 1 << 30)),
        (True, {"side_effect": RendezvousError("no such device")}, None),
        (False, {"side_effect": AttributeError}, None),
    ],
)
def test_without_pyverbs_the_own_wrapper_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    with_verbs: bool,
    answer: dict[str, Any],
    expected: PortLimits | None,
) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "pyverbs.device", absent)
    monkeypatch.setattr(_native, "WITH_VERBS", with_verbs)
    asked = mock.Mock(**answer)
    monkeypatch.setattr(_native, "port_limits", asked, raising=False)
    assert port_limits("mlx5_0", 1) == expected
    assert asked.call_args_list == [mock.call("mlx5_0", 1)] * with_verbs


@pytest.mark.usefixtures("build_with_rdma")
def test_the_own_wrapper_says_nothing_of_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "pyverbs.device", absent)
    assert port_limits("device-of-nobody", 1) is None


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_bls.doctor.library._LIBRARY", "libibverbs-of-nobody.so.1")
    assert "libibverbs-of-nobody.so.1" in load_error()
