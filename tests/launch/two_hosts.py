"""Two network namespaces as two hosts: each with an address, a name and process numbers of its own.

    python tests/launch/two_hosts.py [--loopback-names] COMMAND ...

runs the command on both at the same time. host0 has the address 10.77.0.1, host1 10.77.0.2, and
there is a cable between them. It takes root, util-linux and iproute2. Nothing is left when it ends,
also when it is killed: namespaces end with the processes in them.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")

# What /etc/hosts says: both names, as a name server would, or as Debian's installer leaves it.
NAMES_RESOLVE = ("10.77.0.1 host0\n10.77.0.2 host1\n",) * 2
LOOPBACK_NAMES = ("127.0.1.1 host0\n", "127.0.1.1 host1\n")

_UNSHARE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"),
)

# Runs in the new namespaces; a line on its input says that the link is there.
_START = """
mount -t proc proc /proc
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
hostname "$2"
read -r _
ip link set lo up
ip address add "$3/24" dev cable
ip link set cable up
shift 3
exec "$@" < /dev/null
"""


def why_not() -> str:
    """Returns why hosts can't be made here, empty if they can."""
    missing = [name for name in ("setpriv", "unshare", "ip") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (apt-get install util-linux iproute2)"
    cable = "ip link add name cable0 type veth peer name cable1"
    tried = subprocess.run([*_UNSHARE, "sh", "-c", cable], capture_output=True, text=True)
    if tried.returncode:
        return (
            "no namespaces or no veth link can be made: run this as root, in a container with "
            f"--privileged ({tried.stderr.strip()})"
        )
    return ""


def run(
    command: Sequence[str], *, names: Sequence[str] = NAMES_RESOLVE, deadline: float
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `command` on both hosts at once and returns how it ended on each.

    Args:
        command: a program and its arguments.
        names: /etc/hosts of each, but for localhost.
        deadline: seconds after which both are killed; the exit status is -9 then.
    """
    end = time.monotonic() + deadline
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts: list[subprocess.Popen[str]] = []
        for number in range(len(ADDRESSES)):
            hosts.append(_start(number, folder / f"host{number}", names[number], command))
            stack.callback(_end, hosts[number])
        _wait_for_networks(hosts, end)
        for host in hosts:
            # The cable would go with the host that ends first, before the other has.
            stack.enter_context(Path(f"/proc/{host.pid}/ns/net").open())
        first, second = (f"name cable netns {host.pid}" for host in hosts)
        subprocess.run(f"ip link add {first} type veth peer {second}".split(), check=True)
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write("\n")
            host.stdin.close()
        for host in hosts:
            with suppress(subprocess.TimeoutExpired):
                host.wait(max(0.0, end - time.monotonic()))
        for host in hosts:
            _end(host)
        outputs = [(folder / f"host{number}/output").read_text() for number in range(len(hosts))]
        return [
            subprocess.CompletedProcess(command, host.returncode, output)
            for host, output in zip(hosts, outputs, strict=True)
        ]


def _start(number: int, folder: Path, names: str, command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a host that runs `command` once it is told that it has a cable."""
    folder.mkdir()
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (folder / "resolv.conf").write_text("")  # no name server: an answer at once
    arguments = [str(folder), f"host{number}", ADDRESSES[number], *command]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*_UNSHARE, "sh", "-ec", _START, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _wait_for_networks(hosts: Sequence[subprocess.Popen[str]], end: float) -> None:
    """Returns when the hosts have left this process's network."""
    own = Path("/proc/self/ns/net")
    while any(own.samefile(f"/proc/{host.pid}/ns/net") for host in hosts):
        if time.monotonic() > end or any(host.poll() is not None for host in hosts):
            raise RuntimeError("a host did not come up")
        time.sleep(0.01)


def _end(host: subprocess.Popen[str]) -> None:
    host.kill()
    host.wait()


def main() -> int:
    """Runs the command line's command and returns 0 if it succeeded on both hosts."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--loopback-names", action="store_true", help="each name stands for 127.0.1.1"
    )
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    names = LOOPBACK_NAMES if options.loopback_names else NAMES_RESOLVE
    ended = run(options.command, names=names, deadline=options.deadline)
    for number, process in enumerate(ended):
        print(f"--- host {number}: exit status {process.returncode}\n{process.stdout}")
    return int(any(process.returncode for process in ended))


if __name__ == "__main__":
    sys.exit(main())
