"""What the verbs suite runs, each step a command of bash."""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CPP = "build/native/csrc/tests/bls_tests --no-colors --duration=true"
_PROTOCOL = "--source-file='*/tests/protocol/*' --source-file-exclude='*test_interrupt*'"

_TORCH_TESTS = ("wire_format", "on_device", "faults_on_device")


@dataclass(frozen=True)
class Step:
    """A command that passes if it ends with status 0 in time.

    Attributes:
        name: of the step, and of the file that has its output.
        command: of bash, run in the repository's root.
        deadline: seconds.
    """

    name: str
    command: str
    deadline: float


def steps_on(device: str) -> Iterator[Step]:
    """Yields what runs on any device."""
    yield Step("device", f"ibv_devinfo -d {device}", 20)
    yield Step("pingpong", pingpong(device, device), 40)
    yield Step("C++ processes", f"{_CPP} --test-suite=processes", 300)
    yield Step("C++ protocol", f"{_CPP} {_PROTOCOL}", 600)
    mixed = "TORCHREC_BLS_TEST_TRANSPORT=mixed"
    yield Step("C++ protocol, both transports", f"{mixed} {_CPP} {_PROTOCOL}", 600)


def torch_step(peer: str) -> Step:
    """Returns what needs torch: in one process, as its import takes minutes in the guest."""
    variables = f"TORCHREC_BLS_TEST_PEER_DEVICE={peer} TORCHREC_BLS_TEST_START_METHOD=fork"
    tests = " ".join(f"tests/verbs/test_{name}.py" for name in _TORCH_TESTS)
    pytest = f"{shlex.quote(sys.executable)} -m pytest -p no:cacheprovider -v --durations=20"
    return Step("torch", f"{variables} {pytest} --color=no {tests}", 2400)


def steps_in_guest(device: str, peer: str) -> Iterator[Step]:
    """Yields what needs a second device, joined with the first by a link, and a machine that may be
    spoiled: the link goes down and permissions are taken away."""
    yield Step("pingpong across the link", pingpong(device, peer), 40)
    # The link may be taken down by its network device.
    link = f"$(cat /sys/class/infiniband/{peer}/ports/1/gid_attrs/ndevs/0)"
    between = f"TORCHREC_BLS_TEST_PEER_DEVICE={peer} TORCHREC_BLS_TEST_LINK={link}"
    yield Step("C++ processes across the link", f"{between} {_CPP} --test-suite=processes", 300)
    yield Step("limit of locked memory", f"ulimit -l 8; {_refused('ulimit -l unlimited')}", 60)
    taken = "chmod 400 /dev/infiniband/uverbs*"
    given = "chmod 666 /dev/infiniband/uverbs*"
    refused = _refused("no permission to open /dev/infiniband")
    yield Step("no permission", f"{taken} && {refused}; status=$?; {given}; exit $status", 60)


def _refused(words: str) -> str:
    """Returns a command that passes if a user without privileges is told these words."""
    # Root without what exempts it from limits and permissions; it can still read all files.
    user = "setpriv --bounding-set=-ipc_lock,-dac_override"
    tests = f"{_CPP} --test-suite=processes --test-case='*closes early*'"
    return f'output=$({user} {tests} 2>&1); echo "$output"; grep -qF \'{words}\' <<< "$output"'


def pingpong(device: str, peer: str) -> str:
    """Returns the command that exchanges messages between two processes of rdma-core's own."""
    play = "timeout 30 ibv_rc_pingpong -n 100"
    # The server may not listen yet when the client comes for the first time.
    return (
        f"{play} -d {device} {gid_option(device)} & server=$!; "
        f"for attempt in 1 2 3 4 5; do sleep 1; "
        f"{play} -d {peer} {gid_option(peer)} 127.0.0.1 && break; done && wait $server"
    )


def gid_option(device: str, sysfs: Path = Path("/sys/class/infiniband")) -> str:
    """Returns ibv_rc_pingpong's option for the address of a device's first port: none on
    InfiniBand, on Ethernet RoCE v2's IPv4 address."""
    port = sysfs / device / "ports" / "1"
    if (port / "link_layer").read_text().strip() == "InfiniBand":
        return ""
    for gid in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        if gid.read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            kind = port / "gid_attrs" / "types" / gid.name
            if kind.read_text().strip() == "RoCE v2":
                return f"-g {gid.name}"
    raise RuntimeError(f"{device} has no RoCE v2 address of IPv4: give its network device one")
