"""Ranks on networks as slow as wanted: namespaces of theirs, which end with them. Needs root."""

import argparse
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness.launch import on_ranks
from torchrec_bls.processes import run

_DEADLINE_S = 1200.0
_CLONE_NEWNET = 0x40000000  # sched.h
_HUB = "ip link set lo up && ip link add hub type bridge && ip link set hub up"
# A rank's own end of a cable is in its own namespace.
_PLUG = (
    "nsenter --net=/proc/{hub}/ns/net sh -ec 'ip link add end{rank} type veth peer name rank{rank} "
    "&& ip link set rank{rank} netns {pid} && ip link set end{rank} master hub up && "
    "tc qdisc add dev end{rank} root {limit}' && ip link set lo up && "
    "ip addr add 10.0.0.{address}/24 dev rank{rank} && ip link set rank{rank} up && "
    "tc qdisc add dev rank{rank} root {limit}"
)


class Network(NamedTuple):
    """What passes no more than `gbit` in a second: all ranks' messages, or those of each rank.

    `burst` KiB pass at once, of less than 1 Gbit/s accordingly less. With too few links are slower
    than asked: 128 are enough up to 3 Gbit/s.
    """

    gbit: float
    of_rank: bool
    burst: int = 256

    @property
    def burst_kib(self) -> int:
        """What passes at once."""
        return max(16, round(self.burst * min(self.gbit, 1)))

    @property
    def limit(self) -> str:
        """As tc takes it."""
        return f"tbf rate {1000 * self.gbit:.0f}mbit burst {self.burst_kib}kb latency 100ms"


def check_rights(parser: argparse.ArgumentParser) -> None:
    """Ends the program where networks can't be limited."""
    if os.geteuid() != 0:
        parser.error("a limited network needs root: run as root")
    if shutil.which("tc") is None:
        parser.error("a limited network needs tc: apt install iproute2")


def links_of_ranks(
    parser: argparse.ArgumentParser, settings: Mapping[str, Any]
) -> list[tuple[int, float | None, Network | None]]:
    """All `ranks` and `gbit` of settings, with what limits each rank's link; without gbit ranks are
    on one host. Ends the program where networks can't be limited."""
    if any(settings["gbit"]):
        check_rights(parser)
    return [
        (ranks, gbit, gbit and Network(gbit, of_rank=True))
        for ranks, gbit in product(settings["ranks"], settings["gbit"])
    ]


def over_network(
    network: Network | None, ranks: int, work: Callable[..., Any], *arguments: Any
) -> Any:
    """Calls `work(rank, *arguments)` on every rank, in a gloo group over the network, and returns
    what rank 0 returns; without a network ranks are those of `on_ranks`."""
    if network is None:
        return on_ranks(ranks, work, *arguments)
    return run(1, _in_namespace, network, ranks, work, arguments, deadline_s=_DEADLINE_S)[0]


def _in_namespace(
    _: int, network: Network, ranks: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    _unshare()
    shared = f"ip link set lo up && tc qdisc add dev lo root {network.limit}"
    subprocess.run(_HUB if network.of_rank else shared, shell=True, check=True)
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        joined = (_joined, network, ranks, os.getpid(), store, work, arguments)
        return run(ranks, *joined, deadline_s=_DEADLINE_S)[0]


def _joined(
    rank: int,
    network: Network,
    ranks: int,
    hub: int,
    store: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    interface = "lo"
    if network.of_rank:
        interface = f"rank{rank}"
        _unshare()
        where = {"hub": hub, "rank": rank, "pid": os.getpid(), "address": rank + 1}
        subprocess.run(_PLUG.format(**where, limit=network.limit), shell=True, check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    of_file = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=of_file, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    return work(rank, *arguments)


def _unshare() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace can be made")
