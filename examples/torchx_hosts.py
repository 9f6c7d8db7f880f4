"""torchx component: one job on several hosts that no scheduler joins, by one command on each.

    torchx run -s local_cwd examples/torchx_hosts.py:launch \\
        --endpoint 10.0.0.1:29500 -j 2x4 --script examples/quickstart.py

Run the same on every host. The endpoint is an address of one of them.

Where a scheduler starts the hosts (Slurm, Kubernetes, AWS Batch) use torchx's own `dist.ddp`. It
does not do here: it starts all hosts of a job itself, under a rendezvous id that is new in each
call, and leaves what torchrun and gloo must know of a host to that host's own name. That name often
stands for 127.0.1.1 (Debian) or for another network than the one meant; then no host takes the part
of the rendezvous' store, and ranks announce an address that leads nowhere. This component derives
it all from the way to the endpoint.
"""

import socket

from torchx import specs

from torchrec_bls.doctor.network import interfaces


def launch(*script_args: str, script: str, endpoint: str, j: str = "2x1") -> specs.AppDef:
    """Starts this host's ranks of a job.

    Args:
        script_args: arguments of the script
        script: program that each rank runs
        endpoint: ADDRESS:PORT where the hosts meet: IPv4 address or name of one of them, any port
        j: {hosts}x{ranks on each}
    """
    hosts, _, ranks = j.partition("x")
    interface, own, store = way_to(endpoint.partition(":")[0])
    return specs.AppDef(
        name="torchrec-bls",
        roles=[
            specs.Role(
                name="host",
                image="",
                entrypoint="torchrun",
                args=[
                    *("--nnodes", hosts, "--nproc-per-node", ranks),
                    *("--rdzv-backend", "c10d", "--rdzv-id", "torchrec-bls"),
                    *("--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={int(own == store)}"),
                    *("--local-addr", own),
                    script,
                    *script_args,
                ],
                env={"GLOO_SOCKET_IFNAME": interface},
            )
        ],
    )


def way_to(host: str) -> tuple[str, str, str]:
    """Returns the interface that leads to `host`, its address, and that of `host`.

    Raises:
        ValueError: `host` is unknown, or means this host only.
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
    raise ValueError(f"the endpoint {host} is {store}: give an address that other hosts can reach")
