"""The exchange of table-wise pooled embeddings with and without codecs, on four networks."""

import argparse
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_bls.sharding import load_profile

from benchmarks.codecs.page import exchange_section
from benchmarks.codecs.trained import Lookups, random_lookups, trained_lookups
from benchmarks.harness import record
from benchmarks.harness.launch import gathered, slowest_ms
from benchmarks.harness.networks import Network, check_rights, over_network
from benchmarks.harness.statistics import in_turns
from benchmarks.modules.models import FEATURES, TABLES, Case, Forward, sharded
from benchmarks.modules.quantized import module_of, quantized, sharded_of
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig, ErrorBound
from torchrec_bls.analysis.compression_speeds import measure as measure_compression
from torchrec_bls.analysis.samples import Lookup, SampledTable
from torchrec_bls.codecs import compression
from torchrec_bls.codecs.compression import Compression

RANKS, BATCH, DIM = 4, 512, 64  # samples of each rank
BOUND = 0.01
CODECS = {
    "fp32": None,
    "fp32, unique": CodecConfig(unique=True),
    "uint8": CodecConfig(forward="uint8"),
    "uint4": CodecConfig(forward="uint4"),
    "uint4, unique": CodecConfig(forward="uint4", unique=True),
    "stored int4": None,
    "uint2": CodecConfig(forward="uint2"),
    "bounded": CodecConfig(forward=ErrorBound(BOUND)),
    "bounded, unique, fixed": CodecConfig(forward=ErrorBound(BOUND, None, True), unique=True),
    "bounded, unique": CodecConfig(forward=ErrorBound(BOUND), unique=True),
}
# Rows of a quantized module, as they are stored; each travels once.
STORED = "stored int4"
QUICK = ("fp32", "uint4", STORED)
NETWORKS = {
    "shared memory": None,
    "1 Gbit/s": Network(1.0, of_rank=False),
    "100 Gbit/s a rank": Network(100.0, of_rank=True),
    "1 Gbit/s a rank": Network(1.0, of_rank=True),
}
QUICK_NETWORKS = ("shared memory", "1 Gbit/s a rank")
PARTS = ("output dist", "forward")
_ROWS = 20_000  # of a table at most
_ONES = torch.ones(TABLES * BATCH, dtype=torch.int32)


def chosen(lookups: Lookups, profile: str) -> dict[str, CodecConfig]:
    """Returns for each network what equation 2 takes for each table, by what rank 0 looks up."""
    of_host = load_profile(profile).link(RANKS)
    # Of a rank's rows as many as it has itself stay there.
    of_rank = 1.25e8 * RANKS / (RANKS - 1)
    speeds = (of_host, of_rank / RANKS, 100 * of_rank, of_rank)
    links = dict(zip(NETWORKS, speeds, strict=True))
    measured = {}
    lengths = np.ones(BATCH, np.int64)
    ranks_per_core = max(1.0, RANKS / len(os.sched_getaffinity(0)))
    for number, (ids, rows) in enumerate(zip(lookups.ids, lookups.rows, strict=True)):
        name = f"table_{number}"
        table = SampledTable(name, _ROWS, DIM, True, False, "FP32", (FEATURES[number],))
        lookup = Lookup(ids[:BATCH].numpy(), lengths, rows[:BATCH].numpy())
        measured[name] = measure_compression(table, [[lookup]], BOUND)
    return {
        network: _config(compression.chosen(measured, link, ranks_per_core))
        for network, link in links.items()
    }


def _config(of_tables: dict[str, Compression]) -> CodecConfig:
    forward: dict[str, str | ErrorBound] = {
        name: ErrorBound(BOUND, None, each is Compression.FIXED) if each.bounded else "fp32"
        for name, each in of_tables.items()
    }
    return CodecConfig(forward, unique={name: each.unique for name, each in of_tables.items()})


def parts_of(
    rank: int, transport: str, codec: str, codecs: CodecConfig | None, lookups: Lookups
) -> dict[str, tuple[Forward, int]]:
    """Returns the calls that are timed, and the bytes that this rank sends in one."""
    config = BLSConfig(transport=transport, deadline=120, codecs=codecs)
    own = lookups.ids[:, rank * BATCH : (rank + 1) * BATCH].reshape(-1)
    if codec == STORED:
        return {PARTS[1]: _stored(config, own, lookups)}
    case = Case("EBC", "table_wise", RANKS, BATCH, dim=DIM, rows=_ROWS)
    module = sharded(case, BLSEmbeddingBagCollectionSharder(config=config), dist.group.WORLD, codec)
    for name, shards in module.state_dict().items():
        table = int(name.split("table_")[1].split(".")[0])
        for shard in shards.local_shards():
            shard.tensor[lookups.ids[table]] = lookups.rows[table]
    ids = KeyedJaggedTensor(FEATURES, own, lengths=_ONES)
    context = module.create_context()
    [arrived] = module.input_dist(context, ids).wait().wait()
    rows = module._lookups[0](arrived)

    def output_dist() -> torch.Tensor:
        return module._output_dists[0](rows, context.sharding_contexts[0]).wait()

    calls = (output_dist, lambda: module(ids).wait())
    return {part: (call, _sent_by(module, call)) for part, call in zip(PARTS, calls, strict=True)}


def _stored(config: BLSConfig, own: torch.Tensor, lookups: Lookups) -> tuple[Forward, int]:
    module: Any = module_of("EBC", _ROWS)
    for table, of_table in enumerate(module.embedding_bags.values()):
        of_table.weight.data[lookups.ids[table]] = lookups.rows[table]
    module = sharded_of("EBC", quantized(module, "int4"), "table_wise", config)
    ids = KeyedJaggedTensor([f"f{i}" for i in range(TABLES)], own, lengths=_ONES)

    def call() -> object:
        return module(ids).wait()

    return call, _sent_by(module, call)


def _sent_by(module: Any, call: Forward) -> int:
    """Bytes that this rank sends in a call, which is not the first."""

    def sent() -> int:
        return sum(channel.stats().bytes for channel in module.channels().values())

    call()  # makes the channel
    before = sent()
    call()
    return sent() - before


def measure(
    rank: int, network: str, turns: int, path: Path, kinds: dict[str, CodecConfig | None]
) -> list[dict[str, Any]]:
    """Measures all cells on one rank, in random order."""
    transport, lookups = "tcp" if NETWORKS[network] else "shm", Lookups.load(path)
    with torch.no_grad():
        cells = {
            (part, codec): cell
            for codec, codecs in kinds.items()
            for part, cell in parts_of(rank, transport, codec, codecs, lookups).items()
        }
        timed = {name: partial(slowest_ms, call) for name, (call, _) in cells.items()}
        ms = in_turns(timed, turns, network)
    everyone = gathered({name: sent for name, (_, sent) in cells.items()})
    return [
        {
            **{"network": network, "part": part, "codec": codec},
            "bytes": sum(sent[part, codec] for sent in everyone),
            "most_of_rank": max(sent[part, codec] for sent in everyone),
            "ms": ms[part, codec],
        }
        for part, codec in sorted(cells, key=lambda cell: PARTS.index(cell[0]))
    ]


def _options() -> argparse.Namespace:
    parser = record.parser(
        __doc__,
        quick="two networks; float32, uint4, rows stored in it, the automatic choice; one call",
    )
    parser.add_argument("--turns", type=int, default=40, help="calls of each (%(default)s)")
    parser.add_argument(
        "--train-by", type=Path, metavar="GEN_DATA", help="train the tables by gen_data.py"
    )
    parser.add_argument(
        "--profile",
        default="epyc-milan-2-cores",
        help="that of this host, whose shared memory the automatic choice is for (%(default)s)",
    )
    check_rights(parser)
    return parser.parse_args()


def main() -> None:
    options = _options()
    before = record.environment()
    samples = (RANKS * BATCH, DIM, _ROWS)
    turns, fixed = (
        (1, {each: CODECS[each] for each in QUICK})
        if options.quick
        else (
            options.turns,
            CODECS,
        )
    )
    if options.train_by is None:
        lookups, rows = random_lookups(*samples), "normal, not trained"
    else:
        lookups, rows = trained_lookups(options.train_by, *samples), "of a trained DLRM"
    settings = {"ranks": RANKS, "tables": TABLES, "batch_of_rank": BATCH, "dim": DIM}
    settings |= {"rows": rows, "bound": BOUND, "turns": turns, "profile": options.profile}
    settings["limit"] = Network(1.0, True).limit
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lookups.npz"
        lookups.save(path)
        for network, auto in chosen(lookups, options.profile).items():
            if options.quick and network not in QUICK_NETWORKS:
                continue
            kinds = {**fixed, "auto": auto}
            results += over_network(NETWORKS[network], RANKS, measure, network, turns, path, kinds)
    record.publish(options.json, "codec_exchange", before, settings, results, exchange_section)


if __name__ == "__main__":
    main()
