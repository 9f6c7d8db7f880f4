"""Small transformers under DistributedDataParallel over gloo: steps measured and simulated.

One training step: forward, backward and SGD's step; the slowest rank counts. All models of a suite
take turns in the same processes, some steps each, so that what the machine does meanwhile hits all
alike. Suite A has 2 ranks pinned to a core each, suite B 4 ranks on 2 cores. Figure 11 of the
performance-modelling paper, at the size of a CPU. Suites are kept: the same command goes on.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec_bls.sharding import Profile, ProfiledCosts, load_profile
from torchrec_bls.sharding.costs.fitting.accuracy import (
    bias_percent,
    gmae_percent,
    mape_percent,
)
from torchrec_bls.sharding.simulation.data_parallel import DenseSteps
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from benchmarks.harness import page, record
from benchmarks.harness.launch import on_ranks, pin_to_core, slowest_ms
from benchmarks.harness.statistics import Spread, taking_turns
from benchmarks.simulator.dense.layers import dense_ops
from benchmarks.simulator.dense.measure import measured_model
from benchmarks.simulator.dense.model import DenseModel
from benchmarks.simulator.dense.steps import data_parallel_program, dense_steps

_WARM_UPS, _STEPS = 2, 4  # of a model's turn, the latter timed
_SIMULATED_STEPS = 6
# Dense ops that touch more bytes than these hold take longer.
_CACHES = ("L2", "L3")
_PREDICTIONS = ("simulated", "no contention", "sum of kernels")


@dataclass(frozen=True)
class Model:
    """A transformer's encoder, and its batch."""

    width: int
    depth: int
    length: int
    batch: int

    def shape(self) -> tuple[int, int, int]:
        return self.length, self.batch, self.width

    def module(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            self.width, self.width // 32, 4 * self.width, activation="gelu"
        )
        return nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False)


MODELS = [
    Model(*sizes)
    for sizes in (
        (64, 2, 32, 32),
        (64, 6, 64, 8),
        (128, 2, 32, 16),
        (128, 4, 128, 4),
        (128, 8, 16, 32),
        (192, 3, 64, 8),
        (256, 2, 32, 16),
        (256, 4, 64, 8),
        (256, 6, 16, 8),
        (384, 2, 64, 4),
        (384, 4, 32, 8),
        (512, 2, 32, 8),
    )
]
SUITES = {"A": (2, True), "B": (4, False)}


def main() -> None:
    parser = record.parser(__doc__)
    parser.set_defaults(json=Path("out/simulator_transformer.json"))
    parser.add_argument("--profile", required=True, help="of this machine")
    parser.add_argument("--turns", type=int, default=6, help=f"of {_STEPS} timed steps each")
    options = parser.parse_args()
    profile = load_profile(options.profile)
    sizes = profile.machine.cache_bytes
    caches = [float(sizes[name]) for name in _CACHES if name in sizes]
    settings = {"turns": options.turns, "profile": options.profile}
    head = {"benchmark": "simulator_transformer", "environment": record.environment()}
    empty = {**head, "settings": settings, "results": []}
    kept = record.Resumable(options.json, empty, summarize)
    done = {result["suite"] for result in kept.raw["results"]}
    for suite, (ranks, pinned) in SUITES.items():
        if suite in done:
            continue
        ops = measured_model(caches)
        measured = on_ranks(ranks, _measure, pinned, options.turns)
        kept.raw["results"] += [
            {
                "suite": suite,
                **asdict(model),
                "ms": ms,
                "predicted_ms": predict(profile, ops, model, ranks, pinned),
            }
            for model, ms in zip(MODELS, measured, strict=True)
        ]
        kept.write()
    print(section(summarize(kept.raw)))


def predict(
    profile: Profile, ops: DenseModel, model: Model, ranks: int, pinned: bool
) -> dict[str, float]:
    """Returns milliseconds of a step: simulated, and by the baselines."""
    layers = ops.layer_times(dense_ops(model.module(), model.shape()))
    dense = dense_steps(layers, ranks, ProfiledCosts(profile))
    cores = len(os.sched_getaffinity(0))
    shared = Ranks.on_hosts(ranks, ranks, cores)
    if pinned:
        pools = tuple(rank % cores for rank in range(ranks))
        shared = Ranks(ranks, (1,) * cores, pools)
    alone = Ranks.on_hosts(ranks, ranks, 2 * ranks)
    on_main, reduced = _sums(dense)
    return {
        "simulated": _step_ms(dense, shared),
        "no contention": _step_ms(dense, alone),
        # Of the thread that has most to do, the paper's baseline.
        "sum of kernels": max(on_main, reduced) / 1000,
    }


def _step_ms(dense: DenseSteps, ranks: Ranks) -> float:
    graph = graph_of(data_parallel_program(dense), ranks, _SIMULATED_STEPS)
    return float(simulate(graph).end.max()) / _SIMULATED_STEPS / 1000


def _sums(dense: DenseSteps) -> tuple[float, float]:
    buckets = sum(bucket.work_us + bucket.unpack_us for bucket in dense.buckets)
    on_main = dense.forward_us + buckets + dense.rest_us + dense.optimizer_us
    return on_main, sum(bucket.all_reduce_us for bucket in dense.buckets)


def _measure(rank: int, pinned: bool, turns: int) -> list[list[float]]:
    """Returns each model's timed steps, milliseconds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if pinned:
        pin_to_core(rank)
    torch.manual_seed(0)
    samplers = {model: partial(_some_steps, _stepper(model)) for model in MODELS}
    taken = taking_turns(samplers, turns, "transformers")
    return [[ms for turn in taken[model] for ms in turn] for model in MODELS]


def _stepper(model: Model) -> Callable[[], None]:
    replicated = DistributedDataParallel(model.module())
    optimizer = torch.optim.SGD(replicated.parameters(), lr=1e-4)
    batch, gradient = torch.randn(model.shape()), torch.full(model.shape(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        replicated(batch).backward(gradient)
        optimizer.step()

    return step


def _some_steps(step: Callable[[], None]) -> list[float]:
    return [slowest_ms(step) for _ in range(_WARM_UPS + _STEPS)][_WARM_UPS:]


def summarize(raw: record.Record) -> record.Record:
    """The record, with the spread of each model's steps."""
    return {**raw, "results": [{**each, "ms": Spread(each["ms"])} for each in raw["results"]]}


def section(kept: record.Record) -> str:
    """Tables of the steps, and of the errors by suite."""
    sizes = ("width", "depth", "length", "batch")
    rows: list[Sequence[object]] = []
    errors: list[Sequence[object]] = []
    for suite in SUITES:
        results = [result for result in kept["results"] if result["suite"] == suite]
        for result in results:
            ms, predicted = result["ms"], result["predicted_ms"]
            measured = f"{ms['median']:.2f} [{ms['q1']:.2f}-{ms['q3']:.2f}]"
            by = [f"{predicted[name]:.2f}" for name in _PREDICTIONS]
            rows.append((suite, *(result[name] for name in sizes), measured, *by))
        medians = np.array([result["ms"]["median"] for result in results])
        for name in _PREDICTIONS:
            times = np.array([result["predicted_ms"][name] for result in results])
            figures = (f(times, medians) for f in (gmae_percent, mape_percent, bias_percent))
            errors.append((suite, name, *(f"{figure:.1f}" for figure in figures)))
    steps = page.table(("suite", *sizes, "measured ms [quartiles]", *_PREDICTIONS), rows)
    return page.section(
        kept, steps, page.table(("suite", "by", "GMAE %", "MAPE %", "bias %"), errors)
    )


if __name__ == "__main__":
    main()
