"""Forwards of sharded modules: ours, TorchRec's on gloo and over bls, and FBGEMM's lookup alone."""

import gc
import itertools
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import in_turns, ratio_of_medians
from benchmarks.modules.models import Case, Modules, samplers
from benchmarks.modules.page import section

SHARDINGS = ("table_wise", "row_wise")
# 333 MB at dimension 64, of which the processor's caches hold a few percent.
COLD = 50_000


def cases(ranks: int) -> list[Case]:
    """What is compared among `ranks`: each property over the others' usual values."""
    found: list[Case] = []
    if ranks == 1:  # sums of bags alone
        bags = Case("EBC", SHARDINGS[0], 1, 256)
        found = [bags._replace(ids=n, dim=d) for n in (1, 20, 100) for d in (16, 64, 128)]
        return found + [each._replace(rows=COLD) for each in found]
    for sharding in SHARDINGS:
        ec, ebc = (Case(module, sharding, ranks, 512, rows=COLD) for module in ("EC", "EBC"))
        found += [each._replace(batch=b) for each in (ec, ebc) for b in (1, 8, 64, 512, 2048)]
        found += [ec._replace(batch=batch, ids=50) for batch in (8, 64)]
        for ids, lengths in itertools.product((20, 100), ("fixed", "zipf")):
            bags = ebc._replace(ids=ids, lengths=lengths)
            found += [bags._replace(batch=batch) for batch in ((8, 512) if ids == 20 else (64,))]
        found += [ebc._replace(dim=dim, ids=ids) for dim in (16, 128) for ids in (1, 20)]
        found += [ebc._replace(ids=20, pooling=pooling) for pooling in ("mean", "weighted")]
    # Rows in the caches: the same ids again and again.
    hot = [Case(module, SHARDINGS[0], ranks, 512) for module in ("EC", "EBC") if ranks == 4]
    return found + [each._replace(batch=batch) for each in hot for batch in (512, 2048)]


FULL = {"ranks": [1, 2, 4], "every": 1, "samples": 11, "cold": COLD}
QUICK = {"ranks": [1, 2], "every": 29, "samples": 3, "cold": COLD}


def measure(rank: int, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    # Those of one module together, the largest messages first: slots are made for these.
    cases = sorted(cases, key=lambda case: (_model(case), -case.batch * case.ids))
    results: list[dict[str, Any]] = []
    with torch.no_grad(), tqdm(total=len(cases), unit="case", disable=rank != 0) as bar:
        for model, of_model in itertools.groupby(cases, _model):
            modules = Modules(model)
            for case in of_model:
                results.append(_compare(case, modules, rank, samples))
                bar.update()
            del modules  # before the next ones are made; they are parts of cycles
            gc.collect()
    return results


def _model(case: Case) -> Case:
    return case._replace(batch=0, ids=0, lengths="")


def _compare(case: Case, modules: Modules, rank: int, samples: int) -> dict[str, Any]:
    timed = samplers(modules.forwards(case, rank), fresh=case.rows == COLD)
    for sample in timed.values():
        sample()
    ms = in_turns(timed, samples)
    names = ("torchrec" if "torchrec" in ms else "lookup", "ours", "lookup")
    theirs, ours, lookup = (ms[name].values_in_order for name in names)
    over = {} if theirs is lookup else {"over_lookup": (ours, lookup)}
    ratios = {"speedup": (theirs, ours), **over}
    unusual = {k: v for k, v in case._asdict().items() if v != case._field_defaults.get(k)}
    return {**unusual, "ms": ms} | {name: ratio_of_medians(*of) for name, of in ratios.items()}


def main() -> None:
    arguments = record.parser(__doc__, quick="few samples and cases, 2 ranks").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results: list[dict[str, Any]] = []
    for ranks in settings["ranks"]:
        chosen = cases(ranks)[:: settings["every"]]
        results += on_ranks(ranks, measure, chosen, settings["samples"])
    record.publish(arguments.json, "embedding", before, settings, results, section)


if __name__ == "__main__":
    main()
