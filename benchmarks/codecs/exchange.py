"""The output dist of table-wise pooled embeddings, with and without codecs, among 4 ranks.

Over shared memory, and by transport c10d over a network of 1 Gbit/s in all: a namespace of its own,
whose loopback device passes no more (tc-tbf), and which ends with the ranks in it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ROOT
from benchmarks.codecs.page import exchange_section
from benchmarks.harness import record
from benchmarks.harness.launch import gathered, on_ranks
from benchmarks.harness.statistics import Spread
from torchrec_bls import BLSConfig
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.exchanges.exchange import Exchange
from torchrec_bls.distributed.exchanges.slot_growth import SlotBytes
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedPooledOutputDist
from torchrec_bls.distributed.outputs.pooled_output_dist import ColumnGroup, PooledOutputDist
from torchrec_bls.distributed.outputs.table_codecs import CodecPlan, CodedFeature

RANKS, TABLES, BATCH = 4, 26, 512  # samples of each rank
DIMS = (64, 128)
CODECS = (Codec.FP32, Codec.UINT8, Codec.UINT4, Codec.UINT2)
NETWORKS = {"shared memory": "shm", "1 Gbit/s": "c10d"}
_LIMITED = """
ip link set lo up
tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms
exec "$@"
"""


class OutputDist:
    """One cell: an output dist on this rank and the rows that it sends."""

    def __init__(self, rank: int, transport: str, dim: int, codec: Codec) -> None:
        tables = [len(range(of, TABLES, RANKS)) for of in range(RANKS)]
        config = BLSConfig(transport=transport, deadline=120)
        group: Any = dist.group.WORLD
        name = f"{dim}.{codec.name}"
        self._exchange = Exchange(group, config, name)
        generator = torch.Generator().manual_seed(rank)
        self._rows = torch.randn(RANKS * BATCH, tables[rank] * dim, generator=generator)
        each = [BATCH] * RANKS
        ids: Any = {"counts": [], "values_sent": each, "values_received": each, "counts_sent": []}
        batch: Any = {"number": 0, "all_ended": False, "updates": 0, "refusals": {}}
        layout = IdsLayout(
            order=[*range(RANKS)], strides=each, slot_bytes=SlotBytes(), **ids, **batch
        )
        self._context = SimpleNamespace(bls_ids_layout=layout)
        columns = [ColumnGroup(r, 1, count * dim) for r, count in enumerate(tables)]
        gradients = Exchange(group, config, f"{name} gradients")
        arguments = (columns, rank, self._exchange, gradients, [])
        if codec == Codec.FP32:
            self._output_dist = PooledOutputDist(*arguments)
        else:
            plan = [[CodedFeature(codec, dim)] * count for count in tables]
            self._output_dist = CodedPooledOutputDist(CodecPlan(plan, None), "keep", *arguments)

    def forward(self) -> torch.Tensor:
        """Posts, waits and returns this rank's embeddings."""
        return self._output_dist(self._rows, self._context).wait()

    def bytes_sent(self) -> int:
        """Returns those of the payload that this rank sent to others so far."""
        assert self._exchange.channel is not None
        return self._exchange.channel.stats().bytes


def measure(rank: int, network: str, turns: int) -> list[dict[str, Any]]:
    """Measures all cells on one rank, in random order."""
    cells = {
        (dim, codec): OutputDist(rank, NETWORKS[network], dim, codec)
        for dim in DIMS
        for codec in CODECS
    }
    with torch.no_grad():
        for cell in cells.values():
            cell.forward()
        before = {key: cell.bytes_sent() for key, cell in cells.items()}
        ms: dict[Any, list[float]] = {key: [] for key in cells}
        order, draw = list(cells), random.Random(0)
        for _ in range(turns):
            draw.shuffle(order)
            for key in order:
                dist.barrier()
                begin = time.perf_counter()
                cells[key].forward()
                ms[key].append(1e3 * (time.perf_counter() - begin))
    sent = {key: (cell.bytes_sent() - before[key]) // turns for key, cell in cells.items()}
    everyone = gathered((ms, sent))
    return [
        {
            "network": network,
            "dim": dim,
            "codec": codec.name.lower(),
            "bytes": sum(of_rank[1][dim, codec] for of_rank in everyone),
            "ms": list(
                map(max, zip(*(of_rank[0][dim, codec] for of_rank in everyone), strict=True))
            ),
        }
        for dim, codec in cells
    ]


def _in_network(network: str, turns: int) -> list[dict[str, Any]]:
    """Runs this program on a network and returns the results of each cell."""
    command = [sys.executable, "-m", __spec__.name, "--of", network, "--turns", str(turns)]
    if NETWORKS[network] == "c10d":
        command = ["unshare", "--net", "sh", "-ec", _LIMITED, "sh", *command]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    output = subprocess.run(
        command, check=True, env=environment, timeout=600, cwd=ROOT, stdout=subprocess.PIPE
    ).stdout
    cells = json.loads(output.splitlines()[-1])
    return [cell | {"ms": Spread(cell["ms"])} for cell in cells]


def main() -> None:
    """Runs the benchmark as the command line asks."""
    parser = record.parser(__doc__)
    parser.add_argument("--turns", type=int, default=40, help="calls of each (%(default)s)")
    parser.add_argument("--of", choices=NETWORKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        print(json.dumps(on_ranks(RANKS, measure, arguments.of, arguments.turns)))
        return
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"needs root, util-linux and iproute2; missing: {missing or 'root'}")
    before = record.environment()
    settings = {"ranks": RANKS, "tables": TABLES, "batch_of_rank": BATCH, "turns": arguments.turns}
    settings["limit"] = "tc tbf, 1 Gbit/s for all ranks together"
    results = [cell for network in NETWORKS for cell in _in_network(network, arguments.turns)]
    record.publish(arguments.json, "codec_exchange", before, settings, results, exchange_section)


if __name__ == "__main__":
    main()
