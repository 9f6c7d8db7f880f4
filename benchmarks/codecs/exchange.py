"""The output dist of table-wise pooled embeddings, with and without codecs, on two networks."""

import ctypes
import itertools
import os
import shutil
import subprocess
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.codecs.page import exchange_section
from benchmarks.harness import record
from benchmarks.harness.launch import gathered, on_ranks, slowest_ms
from benchmarks.harness.statistics import in_turns
from benchmarks.modules.models import TABLES, Case, Forward, ids_of, sharded
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig
from torchrec_bls.processes import run

RANKS, BATCH = 4, 512  # samples of each rank
DIMS = (64, 128)
CODECS = ("fp32", "uint8", "uint4", "uint2")
NETWORKS = {"shared memory": "shm", "1 Gbit/s": "c10d"}
_ROWS = 100  # of a table; none is looked up in the time
_LIMIT = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms"
_CLONE_NEWNET = 0x40000000  # sched.h
_DEADLINE_S = 600.0


def output_dist(rank: int, transport: str, dim: int, codec: str) -> tuple[Forward, int]:
    """Returns the forward of a module's output dist, and the bytes that this rank sends in it."""
    config = BLSConfig(transport=transport, deadline=120, codecs=CodecConfig(forward=codec))
    sharder = BLSEmbeddingBagCollectionSharder(config)
    case = Case("EBC", "table_wise", RANKS, BATCH, dim=dim, rows=_ROWS)
    module = sharded(case, sharder, dist.group.WORLD, codec)
    context = module.create_context()
    module.input_dist(context, ids_of(case, rank)).wait().wait()
    columns = dim * len(range(rank, TABLES, RANKS))
    rows = torch.randn(RANKS * BATCH, columns, generator=torch.Generator().manual_seed(rank))

    def forward() -> torch.Tensor:
        return module._output_dists[0](rows, context.sharding_contexts[0]).wait()

    forward()
    [channel] = (each for name, each in module.channels().items() if "embeddings" in name)
    return forward, channel.stats().bytes


def measure(rank: int, network: str, turns: int) -> list[dict[str, Any]]:
    """Measures all cells on one rank, in random order."""
    kinds = list(itertools.product(DIMS, CODECS))
    with torch.no_grad():
        cells = {kind: output_dist(rank, NETWORKS[network], *kind) for kind in kinds}
        timed = {kind: partial(slowest_ms, forward) for kind, (forward, _) in cells.items()}
        ms = in_turns(timed, turns)
    everyone = gathered({kind: sent for kind, (_, sent) in cells.items()})
    return [
        {
            **{"network": network, "dim": dim, "codec": codec},
            "bytes": sum(sent[dim, codec] for sent in everyone),
            "ms": ms[dim, codec],
        }
        for dim, codec in kinds
    ]


def _on_network(_: int, network: str, turns: int) -> Any:
    """Measures in children of this process. 1 Gbit/s is a network namespace of theirs alone, whose
    loopback device passes no more, and which ends with them."""
    if NETWORKS[network] == "c10d":
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace can be made")
        subprocess.run(_LIMIT, shell=True, check=True)
    return on_ranks(RANKS, measure, network, turns)


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--turns", type=int, default=40, help="calls of each (%(default)s)")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("a network of 1 Gbit/s needs root: run as root")
    if shutil.which("tc") is None:
        parser.error("a network of 1 Gbit/s needs tc: apt install iproute2")
    before = record.environment()
    settings = {"ranks": RANKS, "tables": TABLES, "batch_of_rank": BATCH, "turns": arguments.turns}
    settings["limit"] = "tc tbf, 1 Gbit/s for all ranks together"
    results: list[dict[str, Any]] = []
    for network in NETWORKS:
        results += run(1, _on_network, network, arguments.turns, deadline_s=_DEADLINE_S)[0]
    record.publish(arguments.json, "codec_exchange", before, settings, results, exchange_section)


if __name__ == "__main__":
    main()
