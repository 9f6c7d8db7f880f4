"""Starts this host's ranks of a job on several hosts by torchrun, with the right addresses.

    python -m torchrec_bls.launch --endpoint 10.0.0.1:29500 -j 2x4 train.py ...

Run the same on every host. The endpoint is an address of one of them. examples/torchx_hosts.py is
the same as a component of torchx. This module does not need torchx.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from torchrec_bls.doctor.host.network import interfaces


def torchrun_arguments(endpoint: str, job: str) -> tuple[list[str], dict[str, str]]:
    """Returns torchrun's options on this host, up to the script, and the environment of the ranks.

    torchrun and gloo need an address of each host. By default they use the address of its own name.
    That is often 127.0.1.1 (Debian), or an address in another network than the one meant. Then no
    host takes the part of the rendezvous' store, and ranks announce an address that leads nowhere.
    Here everything follows from the way to the endpoint.

    Args:
        endpoint: ADDRESS:PORT where the hosts meet: IPv4 address or name of one of them, any port.
        job: number of hosts and of ranks on each, HOSTSxRANKS.

    Raises:
        ValueError: the endpoint can't be reached or is an address of this host only, or `job` is
            not of the form hosts x ranks, "2x4".
    """
    hosts, _, ranks = job.partition("x")
    if not (hosts.isdecimal() and ranks.isdecimal()):
        raise ValueError(f"the job is {job!r}, but is to be HOSTSxRANKS, for instance 2x4")
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"the endpoint is {endpoint!r}, but is to be ADDRESS:PORT")
    interface, own, store = way_to(host)
    options = [
        *("--nnodes", hosts, "--nproc-per-node", ranks),
        *("--rdzv-backend", "c10d", "--rdzv-id", "torchrec-bls"),
        *("--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={int(own == store)}"),
        *("--local-addr", own),
    ]
    return options, {"GLOO_SOCKET_IFNAME": interface}


def way_to(host: str) -> tuple[str, str, str]:
    """Returns the interface that leads to `host`, the interface's address, and that of `host`.

    Raises:
        ValueError: `host` is unknown, or is an address of this host only.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, 9))  # sends nothing
            own, store = way.getsockname()[0], way.getpeername()[0]
    except OSError as error:
        raise ValueError(f"the endpoint {host} can't be reached: {error}") from error
    for interface, address in interfaces().items():
        if address == own:
            return interface, own, store
    raise ValueError(
        f"the endpoint {host} is {store} here: give an address that other hosts can reach"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Becomes torchrun. Ends with status 2 if the command line can't work."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_bls.launch",
        description="Starts this host's ranks by torchrun. Run the same on every host.",
    )
    add = parser.add_argument
    add("--endpoint", required=True, metavar="ADDRESS:PORT", help="address of a host; any port")
    add("-j", dest="job", default="2x1", metavar="HOSTSxRANKS", help="(default: %(default)s)")
    add("script", nargs=argparse.REMAINDER, help="program that each rank runs, and its arguments")
    given = parser.parse_args(arguments)
    if not given.script:
        parser.error("there is no script to run")
    try:
        options, environment = torchrun_arguments(given.endpoint, given.job)
    except ValueError as error:
        parser.error(str(error))
    os.environ.update(environment)
    # The module, not the program torchrun, which may be another environment's, or not on the PATH.
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    os.execv(sys.executable, [*torchrun, *options, *given.script])


if __name__ == "__main__":
    main()
