"""Which transport joins the ranks, and what they are told where it cannot."""

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from torchrec_bls import BoundedLagChannel, VerbsConfig, _native
from torchrec_bls.errors import RendezvousError
from torchrec_bls.processes import Outcome

_SET_UP = "torchrec_bls.collective"


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: these tests choose for themselves."""


class Mesh:
    """Stands for a transport of _native that joins nothing: which one was made is all it says."""

    made: list[tuple[str, Any]] = []  # noqa: RUF012
    link = "RoCE"
    fork_hazard = ""
    address: tuple[Any, ...] = ([0] * 16, 0, 1024, 0, 0, 0, 0, [], [])

    def __init__(self, name: str, *arguments: Any) -> None:
        self.made.append((name, arguments))

    def connect(self, _: Sequence[Any]) -> None: ...

    def seal(self) -> None: ...


def made_on_hosts(rank: int, hosts: str, transport: str) -> list[tuple[str, Any]]:
    """Returns the transports that a rank makes if ranks are on the hosts of these letters."""
    Mesh.made = []
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch(f"{_SET_UP}.channel.host_identity", return_value=hosts[rank])
        )
        for name in ("ShmTransport", "VerbsTransport", "MixedTransport"):
            make = mock.Mock(side_effect=lambda *a, name=name: Mesh(name, *a), address=(1,))
            stack.enter_context(mock.patch(f"torchrec_bls._native.{name}", make))
        stack.enter_context(mock.patch.object(Mesh, "address", Mesh.address))
        stack.enter_context(mock.patch("torchrec_bls._native.Channel"))
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, transport=transport)
    # Objects cannot leave the process, and names of ranks are not asked for.
    return [(name, [a for a in arguments if _is_numbers(a)]) for name, arguments in Mesh.made]


def _is_numbers(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(isinstance(each, int) for each in argument)
    return isinstance(argument, (int, range))


def names(made: Sequence[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in made]


@pytest.mark.usefixtures("build_with_rdma")
def test_ranks_of_one_host_share_memory_and_hosts_are_joined_by_rdma() -> None:
    for hosts, transport, expected in [
        ("aaa", "auto", ["ShmTransport"]),
        ("aaa", "shm", ["ShmTransport"]),
        ("aaa", "verbs", ["VerbsTransport"]),
        ("abc", "auto", ["VerbsTransport"]),
        ("aba", "verbs", ["VerbsTransport"]),
        ("aba", "auto", ["VerbsTransport", "ShmTransport", "MixedTransport"]),
    ]:
        for made in run(3, made_on_hosts, hosts, transport):
            assert names(made) == expected, (hosts, transport)


@pytest.mark.usefixtures("build_with_rdma")
def test_each_rank_of_several_hosts_reaches_its_own_by_memory_and_the_others_by_rdma() -> None:
    made = run(4, made_on_hosts, "abab", "auto")
    for rank in range(4):
        local = [peer for peer in range(4) if peer % 2 == rank % 2]
        verbs, shm, mixed = (arguments for _, arguments in made[rank])
        assert verbs[-1] == [peer for peer in range(4) if peer not in local]
        assert shm[:2] == [local.index(rank), 2]
        assert mixed == [local, 4]


def create(rank: int, hosts: str, arguments: dict[str, Any]) -> None:
    with mock.patch(f"{_SET_UP}.channel.host_identity", return_value=hosts[rank]):
        BoundedLagChannel(
            dist.group.WORLD, slot_bytes=256, deadline=30, name="ids", **arguments
        ).close()


def check_all(outcomes: Sequence[Outcome], *texts: str) -> None:
    for outcome in outcomes:
        assert outcome.error == "RendezvousError", outcome
        for text in texts:
            assert text in outcome.message


def test_shared_memory_does_not_join_hosts() -> None:
    check_all(
        run_outcomes(2, create, "ab", {"transport": "shm"}),
        "channel 'ids': host differs between ranks (ranks [0] on host a; ranks [1] on host b)",
        "one host, one PID namespace and one user namespace only: use transport='auto', 'verbs' "
        "or 'tcp'",
    )


def without_devices(rank: int, hosts: str, arguments: dict[str, Any]) -> None:
    refusal = RendezvousError("this host has no RDMA device")
    with mock.patch("torchrec_bls._native.VerbsTransport", side_effect=refusal, create=True):
        create(rank, hosts, arguments)


@pytest.mark.usefixtures("build_with_rdma")
def test_who_asks_for_rdma_is_told_what_is_missing() -> None:
    check_all(
        run_outcomes(2, without_devices, "aa", {"transport": "verbs"}),
        "transport 'verbs': this host has no RDMA device",
    )


def exchange_without_devices(rank: int, hosts: str, without: Sequence[int]) -> list[str]:
    """Returns the warnings of two channels between hosts, on which some ranks have no device."""
    if rank in without:
        made: Any = {"side_effect": RendezvousError("this host has no RDMA device")}
    else:
        made = {"side_effect": lambda *arguments: Mesh("VerbsTransport", *arguments)}
    with (
        mock.patch(f"{_SET_UP}.channel.host_identity", return_value=hosts[rank]),
        mock.patch("torchrec_bls._native.VerbsTransport", **made),
        mock.patch("torchrec_bls._native.WITH_VERBS", True),
        mock.patch("torchrec_bls._native.VerbsConfig", create=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        for _ in range(2):
            with BoundedLagChannel(dist.group.WORLD, slot_bytes=256, deadline=30) as channel:
                channel.post([[torch.tensor([rank])]] * len(hosts))
                with channel.wait() as arrival:
                    for source in range(len(hosts)):
                        assert arrival.tensor(source, 0, torch.int64).tolist() == [source]
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("hosts", "without"), [("ab", [0, 1]), ("abc", [1]), ("aab", [2])])
def test_hosts_without_rdma_are_joined_by_tcp_with_one_warning(
    hosts: str, without: list[int]
) -> None:
    (text,), *others = run(len(hosts), exchange_without_devices, hosts, without)
    assert "have no RDMA between them and use TCP instead" in text
    assert f"On rank {without[0]}: this host has no RDMA device" in text
    assert not any(others)


def create_on_links(rank: int, links: Sequence[str]) -> None:
    mesh = Mesh("VerbsTransport")
    mesh.link = links[rank]
    with mock.patch("torchrec_bls._native.VerbsTransport", return_value=mesh):
        create(rank, "ab", {})


@pytest.mark.usefixtures("build_with_rdma")
def test_ports_of_two_kinds_are_not_joined() -> None:
    check_all(
        run_outcomes(2, create_on_links, ["RoCE", "InfiniBand"]),
        "link differs between ranks (ranks [0]: RoCE; ranks [1]: InfiniBand)",
        "Use RDMA ports of one kind on all hosts",
    )


def create_where_forks_are_dangerous(rank: int) -> list[str]:
    mesh = Mesh("VerbsTransport")
    mesh.fork_hazard = "Invalid argument"
    with (
        mock.patch("torchrec_bls._native.VerbsTransport", return_value=mesh),
        mock.patch("torchrec_bls._native.Channel"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, transport="verbs")
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("build_with_rdma")
def test_a_library_that_cannot_prepare_for_forks_is_warned_of() -> None:
    for texts in run(2, create_where_forks_are_dangerous):
        assert len(texts) == 1
        assert "cannot prepare RDMA for forks of this process (Invalid argument)" in texts[0]
        assert "'spawn' or 'forkserver'" in texts[0]


def built_without(rank: int, hosts: str, arguments: dict[str, Any]) -> None:
    with mock.patch("torchrec_bls._native.WITH_VERBS", False):
        create(rank, hosts, arguments)


def test_a_build_without_rdma_says_how_to_get_it() -> None:
    check_all(
        run_outcomes(2, built_without, "aa", {"transport": "verbs"}),
        "install libibverbs-dev and reinstall torchrec-bls",
    )


def test_ranks_that_want_different_transports_are_told() -> None:
    outcomes = run_outcomes(2, create_as, ["shm", "verbs"])
    check_all(outcomes, "transport differs between ranks (ranks [0]: shm; ranks [1]: verbs)")


def create_as(rank: int, transports: Sequence[str]) -> None:
    create(rank, "aa", {"transport": transports[rank]})


def test_a_transport_that_does_not_exist_is_refused() -> None:
    (outcome,) = run_outcomes(1, create, "a", {"transport": "udp"})
    assert outcome.error == "ValueError"
    assert outcome.message == "transport is 'udp', but has to be one of auto, shm, verbs, tcp"


_WITHOUT_THE_LIBRARY = """
import torch.distributed as dist
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import RendezvousError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with BoundedLagChannel(dist.group.WORLD, slot_bytes=256) as channel:
    channel.post([[]])
    channel.wait().release()
try:
    BoundedLagChannel(dist.group.WORLD, slot_bytes=256, transport="verbs")
except RendezvousError as error:
    print(error)
"""


def test_without_libibverbs_the_package_imports_and_shared_memory_works(tmp_path: Path) -> None:
    # Found before the real one, and no library.
    (tmp_path / "libibverbs.so.1").touch()
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THE_LIBRARY],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    missing = "RDMA needs libibverbs.so.1, which cannot be loaded"
    assert (missing if _native.WITH_VERBS else "has no RDMA") in done.stdout
    assert "nstall" in done.stdout


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, VerbsConfig()),
        ({"TORCHREC_BLS_IB_DEVICE": "mlx5_1"}, VerbsConfig(device="mlx5_1")),
        (
            {"TORCHREC_BLS_IB_PORT": "2", "TORCHREC_BLS_IB_GID_INDEX": "3", "OTHER": "x"},
            VerbsConfig(port=2, gid_index=3),
        ),
        ({"TORCHREC_BLS_IB_MTU": "4096"}, VerbsConfig(mtu=4096)),
    ],
)
def test_environment_variables_fill_the_configuration(
    environment: dict[str, str], expected: VerbsConfig
) -> None:
    assert VerbsConfig.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TORCHREC_BLS_IB_PORT": "two"}, "TORCHREC_BLS_IB_PORT is 'two', but must be a whole"),
        ({"TORCHREC_BLS_IB_RETRY_COUNT": "7"}, "retry_count is 7, but must be from 0 to 6"),
        ({"TORCHREC_BLS_IB_MTU": "9000"}, "mtu is 9000, but must be one of"),
        ({"TORCHREC_BLS_IB_DEVICES": "x"}, "TORCHREC_BLS_IB_DEVICES is set, but there are only"),
    ],
)
def test_environment_variables_that_make_no_sense_are_refused(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match="TORCHREC_BLS_IB_") as caught:
        VerbsConfig.from_environment(environment)
    assert message in str(caught.value)


@pytest.mark.usefixtures("build_with_rdma")
def test_the_defaults_are_those_of_the_compiled_part() -> None:
    native = _native.VerbsConfig()
    assert {name: getattr(native, name) for name in vars(VerbsConfig())} == vars(VerbsConfig())
