"""What it costs forwards in training to note their ids: of our modules, and of TorchRec's own.

`DeltaWriter` knows from the ids of lookups which rows have changed. It notes those of a batch at
once. TorchRec's ModelDeltaTracker would take them apart within the forward. All forwards take turns
in the same processes.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks, slowest_ms
from benchmarks.harness.statistics import in_turns, ratio_of_medians
from benchmarks.modules.models import KINDS, Case, ids_of, sharded
from benchmarks.modules.page import tracking_section
from torchrec_bls import BLSConfig
from torchrec_bls.lookup_notes import LookupNotes

COLD = 50_000
FULL = {"ranks": [2], "batches": [64, 512], "samples": 21}
QUICK = {"ranks": [2], "batches": [64], "samples": 3}
SHARDINGS = ("table_wise", "row_wise")
_FORWARDS = 3  # of a sample


#: How ids are noted.
WAYS = ("nothing", "DeltaWriter", "tracker")


class Tracked:
    """A module whose forwards note their ids in one of WAYS.

    Args:
        module: the sharded module.
        name: by which errors call it.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        holder = nn.Module()
        holder.module = nn.Module()
        holder.module.add_module(name, module)
        self._tracker = ModelDeltaTrackerTrec(holder)
        record_lookup = module.post_lookup_tracker_fn
        self._notes = LookupNotes(self._tracker)
        self._by_way = dict(zip(WAYS, (None, self._notes.note, record_lookup), strict=True))

    def sample(self, case: Case, rank: int, seeds: Any, way: str) -> float:
        """Milliseconds of a forward in training, of a few back to back, on the slowest rank.

        The backward that follows each of them, since modules keep their exchanges until then, is
        not in that time.
        """
        self._module.post_lookup_tracker_fn = self._by_way[way]
        spent = 0.0
        for _ in range(_FORWARDS):
            ids = ids_of(case, rank, next(seeds))
            outputs: list[torch.Tensor] = []
            spent += slowest_ms(lambda ids=ids, out=outputs: out.append(_values(self._module, ids)))
            outputs.pop().sum().backward()
        self._tracker.clear()
        self._notes.clear()
        return spent / _FORWARDS


def _values(module: Any, ids: Any) -> torch.Tensor:
    output = module(ids).wait()
    values = output.values()
    if isinstance(values, torch.Tensor):
        return values
    return torch.cat([jagged.values() for jagged in values])


def measure(rank: int, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    """Milliseconds of each, and the ratios to those that note nothing."""
    results = []
    for case in tqdm(cases, unit="case", disable=rank != 0):
        _, _, theirs, ours = KINDS[case.module]
        fused = {"learning_rate": 0.01}
        modules = {
            "ours": sharded(
                case, ours(config=BLSConfig(), fused_params=dict(fused)), dist.group.WORLD
            ),
            "torchrec": sharded(case, theirs(fused_params=dict(fused)), dist.group.WORLD),
        }
        tracked = {name: Tracked(module, name) for name, module in modules.items()}
        seeds = itertools.count(1)
        timed: dict[str, Callable[[], float]] = {
            f"{name} {way}": partial(each.sample, case, rank, seeds, way)
            for name, each in tracked.items()
            for way in WAYS
        }
        for sample in timed.values():
            sample()
        ms = in_turns(timed, samples)
        ratios = {
            f"{name} {way}": ratio_of_medians(
                ms[f"{name} {way}"].values_in_order, ms[f"{name} nothing"].values_in_order
            )
            for name in modules
            for way in WAYS[1:]
        }
        results.append({**case._asdict(), "ms": ms, "ratios": ratios})
    return results


def main() -> None:
    arguments = record.parser(__doc__, quick="few samples and cases, 2 ranks").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results: list[dict[str, Any]] = []
    for ranks in settings["ranks"]:
        cases = [
            Case(module, sharding, ranks, batch, rows=COLD)
            for module, sharding in itertools.product(KINDS, SHARDINGS)
            for batch in settings["batches"]
        ]
        results += on_ranks(ranks, measure, cases, settings["samples"])
    record.publish(arguments.json, "tracking", before, settings, results, tracking_section)


if __name__ == "__main__":
    main()
