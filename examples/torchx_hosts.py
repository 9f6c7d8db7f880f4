"""torchx component: one job on several hosts that no scheduler joins, by one command on each.

    torchx run -s local_cwd examples/torchx_hosts.py:launch \\
        --endpoint 10.0.0.1:29500 -j 2x4 --script examples/quickstart.py

Run the same on every host. The endpoint is an address of one of them. Without torchx, which
does not run on Python 3.14,

    python -m torchrec_bls.launch --endpoint 10.0.0.1:29500 -j 2x4 examples/quickstart.py

does the same. Where a scheduler starts the hosts (Slurm, Kubernetes, AWS Batch) use torchx's own
`dist.ddp`. It does not work here, for two reasons. It starts all hosts of a job itself, under a
rendezvous id that is new in each call. And torchrun and gloo must know an address of each host,
which `dist.ddp` lets them take from the host's own name.
"""

from torchx import specs

from torchrec_bls.launch import torchrun_arguments


def launch(*script_args: str, script: str, endpoint: str, j: str = "2x1") -> specs.AppDef:
    """Starts this host's ranks of a job.

    Args:
        script_args: arguments of the script
        script: program that each rank runs
        endpoint: ADDRESS:PORT where the hosts meet: IPv4 address or name of one of them, any port
        j: {hosts}x{ranks on each}
    """
    options, environment = torchrun_arguments(endpoint, j)
    return specs.AppDef(
        name="torchrec-bls",
        roles=[
            specs.Role(
                name="host",
                image="",
                entrypoint="torchrun",
                args=[*options, script, *script_args],
                env=environment,
            )
        ],
    )
