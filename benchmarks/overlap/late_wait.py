"""Backwards of a DLRM whose wait for its embeddings' gradients comes last, over slow links."""

import time
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered
from benchmarks.harness.networks import links_of_ranks, over_network
from benchmarks.harness.statistics import in_turns, ratio_of_medians
from benchmarks.modules.models import KINDS, Case, ids_of, sharded
from benchmarks.overlap.models import DENSE, MODELS, TABLES
from torchrec_bls import BLSConfig
from torchrec_bls.distributed.outputs import output_dist

MODEL = "Kaggle DLRM"
FULL: dict[str, Any] = {"ranks": [2, 4], "gbit": [1.0], "samples": [512, 2048]}
FULL |= {"turns": 25, "warm_up": 5}
QUICK = FULL | {"ranks": [2], "gbit": [None], "samples": [64], "turns": 2, "warm_up": 2}
NAMES = {"late": "late", "early": "early", "torchrec": "TorchRec over gloo"}


class _Model(nn.Module):
    """A DLRM around embeddings that are sharded, which are none of its submodules."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, self._dim, _ = MODELS[MODEL]
        self._dense, self._embeddings = make(), [embeddings]

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        bottom = self._dense.dense(dense)
        sparse = self._embeddings[0](ids).wait().values().view(-1, TABLES, self._dim)
        return self._dense.over(self._dense.interaction(bottom, sparse))


def measure_on_rank(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the ms of backwards on the slowest rank, by number of samples."""
    results = []
    for samples in settings["samples"]:
        ranks = dist.get_world_size()
        case = Case("EBC", "table_wise", ranks, samples, dim=MODELS[MODEL][1])
        ours, torchrec = (
            DistributedDataParallel(
                _Model(sharded(case, sharder, dist.group.WORLD)),
                bucket_cap_mb=25,  # TorchRec's
                gradient_as_bucket_view=True,
            )
            for sharder in (KINDS["EBC"][3](config=BLSConfig(transport="tcp")), KINDS["EBC"][2]())
        )
        batch = torch.rand(samples, DENSE), ids_of(case, rank)
        as_numbered = partial(mock.patch.object, output_dist, "run_last", lambda *_: None)
        samplers = {
            "late": partial(_backward_ms, ours, batch, nullcontext),
            "early": partial(_backward_ms, ours, batch, as_numbered),
            "torchrec": partial(_backward_ms, torchrec, batch, nullcontext),
        }
        for sample in samplers.values():
            for _ in range(settings["warm_up"]):
                sample()
        ms = in_turns(samplers, settings["turns"])
        over = {
            name: ratio_of_medians(ms["late"].values_in_order, ms[name].values_in_order)
            for name in ("early", "torchrec")
        }
        results.append({"ranks": ranks, "samples": samples, "ms": ms, "over": over})
    return results


def _backward_ms(model: nn.Module, batch: Any, numbering: Any) -> float:
    with numbering():
        loss = model(*batch).sum()
    dist.barrier()
    begin = time.perf_counter()
    loss.backward()
    return 1e3 * float(np.max(gathered(time.perf_counter() - begin)))


def section(made: record.Record) -> str:
    """All cells."""
    rows = []
    for cell in made["results"]:
        link = "loopback" if cell["gbit"] is None else f"{cell['gbit']:g} Gbit/s"
        ratios = [f"{r:.2f} ({low:.2f}-{high:.2f})" for low, r, high in cell["over"].values()]
        ms = [f"{cell['ms'][name]['median']:.1f}" for name in NAMES]
        rows.append([cell["ranks"], link, cell["samples"], *ms, *ratios])
    header = ["ranks", "link", "samples a rank", *NAMES.values(), "over early", "over TorchRec"]
    return page.section(
        made,
        f"Milliseconds of a backward of the {MODEL}, tables of 16 columns sharded table-wise, the "
        "dense part in DistributedDataParallel with TorchRec's buckets; slowest rank, medians of "
        "the turns; ratios of medians with their 95 % intervals by bootstrap.",
        page.table(header, rows),
    )


def main() -> None:
    parser = record.parser(__doc__, quick="two ranks on loopback, two turns")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else FULL
    links = links_of_ranks(parser, settings)
    before = record.environment()
    results = []
    for ranks, gbit, network in links:
        found = over_network(network, ranks, measure_on_rank, settings)
        results += [{"gbit": gbit} | each for each in found]
    record.publish(arguments.json, "late_wait", before, settings, results, section)


if __name__ == "__main__":
    main()
