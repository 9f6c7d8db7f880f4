"""Forwards that read all ranks' tables, beside bound 0, TorchRec on gloo and FBGEMM's kernel."""

import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from benchmarks.direct.page import section
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import in_turns, ratio_of_medians
from benchmarks.modules.models import (
    HOT_ROWS,
    KINDS,
    TABLES,
    Case,
    Forward,
    ids_of,
    samplers,
    sharded,
)
from torchrec_bls import BLSConfig

COLD = 50_000
FULL = {"ranks": [2, 4], "every": 1, "samples": 31}
QUICK = {"ranks": [2], "every": 23, "samples": 3}


def cases(ranks: int) -> list[Case]:
    """Batches from 1 to 2,048, hot and cold; and what direct reads have least to gain from: long
    bags, and weights."""
    found = [
        Case(module, sharding, ranks, batch, rows=rows)
        for module, sharding in itertools.product(("EC", "EBC"), ("table_wise", "row_wise"))
        for rows in (HOT_ROWS, COLD)
        for batch in (1, 8, 64, 512, 2048)
    ]
    for sharding in ("table_wise", "row_wise"):
        bags = Case("EBC", sharding, ranks, 512, ids=20, rows=COLD)
        found += [bags, bags._replace(pooling="weighted"), bags._replace(ids=100, batch=64)]
    return found


def measure(rank: int, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    cases = sorted(cases, key=lambda case: (_model(case), -case.batch * case.ids))
    results: list[dict[str, Any]] = []
    with torch.no_grad(), tqdm(total=len(cases), unit="case", disable=rank != 0) as bar:
        for model, of_model in itertools.groupby(cases, _model):
            forwards = _forwards(model)
            for case in of_model:
                results.append(_compare(case, forwards, rank, samples))
                bar.update()
            del forwards
            gc.collect()
    return results


def _model(case: Case) -> Case:
    return case._replace(batch=0, ids=0, lengths="")


def _forwards(case: Case) -> dict[str, Callable[[KeyedJaggedTensor], object]]:
    _, _, theirs, ours = KINDS[case.module]
    modules = {
        "torchrec": sharded(case, theirs(), dist.group.WORLD),
        "bound 0": sharded(case, ours(config=BLSConfig()), dist.group.WORLD),
        "direct": sharded(
            case, ours(config=BLSConfig(lookup="direct")), dist.group.WORLD, "direct"
        ),
    }
    forwards = {name: partial(_forward, module) for name, module in modules.items()}
    return {**forwards, "lookup": _whole_tables(case)}


def _forward(module: Any, ids: KeyedJaggedTensor) -> object:
    return module(ids).wait()


def _whole_tables(case: Case) -> Callable[[KeyedJaggedTensor], object]:
    """FBGEMM's kernel of all tables in this rank's own memory, without any check of ids."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        pooling_mode=PoolingMode.NONE if case.module == "EC" else PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=torch.device("cpu"),
    )
    kernel.weights_host.normal_()

    def look_up(ids: KeyedJaggedTensor) -> object:
        return kernel(ids.values().long(), ids.offsets().long(), ids.weights_or_none())

    return look_up


def _compare(case: Case, forwards: Any, rank: int, samples: int) -> dict[str, Any]:
    def prepared(call: Callable[[Any], object], seed: int) -> Forward:
        ids = ids_of(case, rank, seed)
        ids.offsets()  # the kernel takes them, and modules make them if they need any
        return partial(call, ids)

    timed = samplers(
        {name: partial(prepared, call) for name, call in forwards.items()}, case.rows == COLD
    )
    for sample in timed.values():
        sample()
    ms = in_turns(timed, samples)
    of = {name: ms[name].values_in_order for name in ms}
    unusual = {k: v for k, v in case._asdict().items() if v != case._field_defaults.get(k)}
    ratios = {
        "over_lookup": ratio_of_medians(of["direct"], of["lookup"]),
        "speedup": ratio_of_medians(of["bound 0"], of["direct"]),
        "over_torchrec": ratio_of_medians(of["torchrec"], of["direct"]),
    }
    return {**unusual, "ms": ms, **ratios}


def main() -> None:
    arguments = record.parser(__doc__, quick="few samples and cases, 2 ranks").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results: list[dict[str, Any]] = []
    for ranks in settings["ranks"]:
        results += on_ranks(ranks, measure, cases(ranks)[:: settings["every"]], settings["samples"])
    record.publish(arguments.json, "direct_reads", before, settings, results, section)


if __name__ == "__main__":
    main()
