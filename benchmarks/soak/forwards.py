"""Measures by how much memory grows with each forward under autograd whose backward is left out."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered, on_ranks
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder
from torchrec_bls.distributed.codec_config import CodecConfig

SETTINGS: dict[str, Any] = {
    "ranks": 2,
    "warm_up": 2_000,  # forwards of a case before the first look at its memory
    "forwards": 10_000,  # between the first look and the last
    "allowed": 100,  # bytes a forward, above the allocator's noise
    "samples": 8,
    "dim": 16,
    "rows": 1_000,
}
# Of two sharding types, since a loss may leave out the features of one.
TABLES = {"a": "table_wise", "b": "row_wise", "c": "table_wise", "d": "row_wise"}

Step = Callable[[nn.Module, KeyedJaggedTensor], object]


def skip(module: nn.Module, ids: KeyedJaggedTensor) -> None:
    """A forward and nothing else: an evaluation without no_grad, or a skipped step."""
    module(ids).wait()


def train(features: str, module: nn.Module, ids: KeyedJaggedTensor) -> None:
    """A step whose loss has these features."""
    output = module(ids).wait()
    losses = [
        (e if torch.is_tensor(e) else e.values()).sum() for e in map(output.__getitem__, features)
    ]
    sum(losses, torch.zeros(())).backward()


#: By name the module, the tables that are data-parallel, and the step.
CASES: dict[str, tuple[str, str, Step]] = {
    "EBC": ("ebc", "", skip),
    "EBC, weighted": ("weighted", "", skip),
    "EBC with a data_parallel table": ("ebc", "c", skip),
    "EBC, all steps": ("ebc", "", partial(train, "abcd")),
    "EC": ("ec", "", skip),
    "EC, a loss without the row-wise features": ("ec", "", partial(train, "ac")),
    "EC, all steps": ("ec", "", partial(train, "abcd")),
}
PEERS = ("ours", "ours, codecs", "torchrec", "torchrec over bls")


def growth(rank: int, case: str, peer: str, settings: dict[str, Any]) -> list[float]:
    """Returns by how many bytes a forward each rank has grown."""
    kind, replicated, step = CASES[case]
    module = _sharded(kind, replicated, peer, settings)
    batches = [_ids(kind, settings, 10 * seed + rank) for seed in range(8)]

    def repeat(forwards: int) -> int:
        for i in range(forwards):
            step(module, batches[i % len(batches)])
        return _private_bytes()

    first = repeat(settings["warm_up"])
    grown = repeat(settings["forwards"]) - first
    return gathered(grown / settings["forwards"])


def _sharded(kind: str, replicated: str, peer: str, settings: dict[str, Any]) -> nn.Module:
    config_type: Any = EmbeddingConfig if kind == "ec" else EmbeddingBagConfig
    sizes = {"num_embeddings": settings["rows"], "embedding_dim": settings["dim"]}
    tables = [config_type(name=f"t_{name}", feature_names=[name], **sizes) for name in TABLES]
    module: Any = (
        EmbeddingCollection(tables=tables)
        if kind == "ec"
        else EmbeddingBagCollection(tables=tables, is_weighted=kind == "weighted")
    )
    sharder, group = _peer(kind, peer)
    world_size = group.size()
    places: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda place: sharding_plan.table_wise(
            place % world_size, compute_kernel="fused"
        ),
        "row_wise": lambda _: sharding_plan.row_wise(compute_kernel="fused"),
        "data_parallel": lambda _: sharding_plan.data_parallel(),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        module,
        {
            f"t_{name}": places["data_parallel" if name in replicated else sharding](place)
            for place, (name, sharding) in enumerate(TABLES.items())
        },
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(group)
    sharded: nn.Module = sharder.shard(module, plan, env, torch.device("cpu"), "embeddings")
    return sharded


def _peer(kind: str, peer: str) -> tuple[Any, Any]:
    ours, theirs = (
        (BLSEmbeddingCollectionSharder, EmbeddingCollectionSharder)
        if kind == "ec"
        else (BLSEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder)
    )
    if peer == "torchrec":
        return theirs(), dist.group.WORLD
    if peer == "torchrec over bls":
        return theirs(), dist.new_group(backend="bls")
    coded = CodecConfig(forward="fp16", backward="fp16", unique=True)
    return ours(config=BLSConfig(codecs=coded if "codecs" in peer else None)), dist.group.WORLD


def _ids(kind: str, settings: dict[str, Any], seed: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.full((len(TABLES) * settings["samples"],), 2, dtype=torch.int32)
    values = torch.randint(settings["rows"], (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if kind == "weighted" else None
    return KeyedJaggedTensor(list(TABLES), values, weights, lengths=lengths)


def _private_bytes() -> int:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def problems(results: record.Record, settings: dict[str, Any]) -> list[str]:
    """One line for each case in which a rank of ours has grown."""
    return [
        f"{case}, {peer}: {max(grown):.0f} B a forward"
        for case, peers in results.items()
        for peer, grown in peers.items()
        if peer.startswith("ours") and max(grown) > settings["allowed"]
    ]


def section(run: record.Record) -> str:
    settings = run["settings"]
    rows = [
        [case, *(f"{max(peers[peer]):.1f}" for peer in PEERS)]
        for case, peers in run["results"].items()
    ]
    return page.section(
        run,
        f"By how many bytes a forward resident memory grew, over {settings['forwards']:,} forwards "
        f"under autograd after {settings['warm_up']:,}, of {settings['ranks']} ranks the one that "
        'grew most. Without "steps" or "loss" there is no backward:',
        page.table(["", *PEERS], rows),
    )


def main() -> None:
    """Measures all cases; exits with 1 when one of ours has grown."""
    parser = record.parser(__doc__, quick="a fifth of the forwards")
    options = parser.parse_args()
    settings = dict(SETTINGS)
    if options.quick:
        settings |= {name: SETTINGS[name] // 5 for name in ("warm_up", "forwards")}
    before = record.environment()
    results = {
        case: {peer: on_ranks(settings["ranks"], growth, case, peer, settings) for peer in PEERS}
        for case in CASES
    }
    record.publish(options.json, "soak-forwards", before, settings, results, section)
    if found := problems(results, settings):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
