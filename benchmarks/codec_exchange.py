"""The output dist of table-wise pooled embeddings, with and without codecs, among 4 ranks.

Over shared memory, and by transport c10d over a network of 1 Gbit/s in all: a namespace of its own,
whose loopback device passes no more (tc-tbf), and which ends with the ranks in it. See README.md in
this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import environment, spread, write_json

from torchrec_bls import BLSConfig
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.exchanges.exchange import Exchange
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.outputs.encoded_output_dists import CodedPooledOutputDist
from torchrec_bls.distributed.outputs.output_dist import ColumnGroup, PooledOutputDist
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
        self._rows = torch.randn(
            RANKS * BATCH, tables[rank] * dim, generator=torch.Generator().manual_seed(rank)
        )
        strides = [BATCH] * RANKS
        layout = IdsLayout([*range(RANKS)], strides, [], strides, strides, [])
        self._context = SimpleNamespace(bls_ids_layout=layout)
        arguments = (
            [ColumnGroup(r, 1, count * dim) for r, count in enumerate(tables)],
            rank,
            self._exchange,
            Exchange(group, config, f"{name} gradients"),
            [],
        )
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


def rank_main(rank: int, port: int, transport: str, turns: int, out: str) -> None:
    """Measures all cells in random order; rank 0 writes the times of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    cells = {
        (dim, codec): OutputDist(rank, transport, dim, codec) for dim in DIMS for codec in CODECS
    }
    with torch.no_grad():
        for cell in cells.values():
            cell.forward()
        before = {key: cell.bytes_sent() for key, cell in cells.items()}
        seconds: dict[Any, list[float]] = {key: [] for key in cells}
        order, draw = list(cells), random.Random(0)
        for _ in range(turns):
            draw.shuffle(order)
            for key in order:
                dist.barrier()
                seconds[key].append(_seconds(cells[key].forward))
    sent = {key: (cell.bytes_sent() - before[key]) // turns for key, cell in cells.items()}
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (seconds, sent))
    if rank == 0:
        results = [
            {
                "dim": dim,
                "codec": codec.name.lower(),
                "bytes": sum(of_rank[1][dim, codec] for of_rank in everyone),
                "ms": spread(
                    [
                        1000 * max(turn)
                        for turn in zip(*(r[0][dim, codec] for r in everyone), strict=True)
                    ]
                ),
            }
            for dim, codec in cells
        ]
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(network: str, turns: int) -> list[dict[str, Any]]:
    """Runs the ranks on a network and returns the results of each cell."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/results.json"
        command = [sys.executable, __file__, "--of", network, "--turns", str(turns), "--out", out]
        if NETWORKS[network] == "c10d":
            command = ["unshare", "--net", "sh", "-ec", _LIMITED, "sh", *command]
        subprocess.run(
            command, check=True, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, timeout=600
        )
        results: list[dict[str, Any]] = json.loads(Path(out).read_text())
        return [{"network": network} | cell for cell in results]


def table(started_in: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Bytes and medians, and how they compare with float32."""
    lines = [
        f"{started_in['cpu']}, {started_in['cores']} cores, load {started_in['load_average']} "
        f"before, torch {started_in['versions']['torch']}",
        f"commit {started_in['commit']}; {started_in['date']}; {started_in['command']}",
        "",
        f"{TABLES} tables among {RANKS} ranks, {BATCH} samples each; slowest rank, median",
        f"{'network':14} {'dim':>4} {'codec':6} {'MB':>7} {'less':>5} {'ms':>8} {'faster':>7}",
    ]
    for cell in results:
        plain = next(
            other
            for other in results
            if (other["network"], other["dim"], other["codec"])
            == (cell["network"], cell["dim"], "fp32")
        )
        ms, before = cell["ms"]["median"], plain["ms"]["median"]
        lines.append(
            f"{cell['network']:14} {cell['dim']:4} {cell['codec']:6} {cell['bytes'] / 1e6:7.2f} "
            f"{plain['bytes'] / cell['bytes']:5.2f} {ms:8.2f} {before / ms:7.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--turns", type=int, default=30, help="calls of each (%(default)s)")
    parser.add_argument("--of", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        port = 29700 + os.getpid() % 200
        mp.spawn(
            rank_main,
            (port, NETWORKS[arguments.of], arguments.turns, arguments.out),
            nprocs=RANKS,
        )
        return
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        parser.error(
            f"needs root, util-linux and iproute2; missing: {', '.join(missing) or 'root'}"
        )
    started_in = environment()
    settings = {
        "ranks": RANKS,
        "tables": TABLES,
        "batch_of_rank": BATCH,
        "turns": arguments.turns,
        "limit": "tc tbf, 1 Gbit/s for all ranks together",
    }
    results = [cell for network in NETWORKS for cell in measure(network, arguments.turns)]
    if arguments.json:
        write_json(arguments.json, "codec_exchange", started_in, settings, results)
    print(table(started_in, results))


if __name__ == "__main__":
    main()
