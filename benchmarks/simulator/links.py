"""Codecs on slow links: forwards measured, and the codec that a simulation takes.

Suite D of the study: 26 tables on two ranks with a core each, over the transport `tcp`. Each rank
has a link, limited to rates that TCP and the cores can keep up with; as little passes at once as
the rate needs. As in suites A and B all ranks begin a step together, and codecs take turns step by
step. The ranks are started several times: where their memory lies changes a forward of a
millisecond by up to a third.
"""

import logging
import warnings
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torchrec_bls.sharding.calibration.codec_costs import measure_codecs
from torchrec_bls.sharding.calibration.configurations import TableConfiguration
from torchrec_bls.sharding.calibration.step_models import BATCHES, Collection, StepModel
from torchrec_bls.sharding.calibration.steps import batch_of, step_of
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.tables import TABLE_WISE, PlacedShard, PlacedTable
from torchrec_bls.sharding.simulation.bounds import Simulation, simulate_bounds
from torchrec_bls.sharding.simulation.choose_codec import choose_codec
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.engine.timeline import Timeline
from torchrec_bls.sharding.simulation.program import Ranks
from torchrec_bls.sharding.simulation.wire.link import Link

from benchmarks.harness import page, record
from benchmarks.harness.launch import pin_to_core, slowest_ms
from benchmarks.harness.networks import Network, check_rights, over_network
from benchmarks.harness.statistics import Spread, in_turns
from benchmarks.modules.models import HOT_ROWS, TABLES
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig

RANKS = 2
CODECS = ("fp32", "uint8", "uint4")
_GBIT_IN_BYTES_PER_US = 125.0
_WARM_UPS = 3
_FEW_BATCHES = 10


def main() -> None:
    parser = record.parser(__doc__, quick="one rate, one batch, few calls")
    parser.set_defaults(json=Path("out/simulator_links.json"))
    parser.add_argument("--profile", required=True, help="of this machine, with host costs")
    check_rights(parser)
    options = parser.parse_args()
    settings: dict[str, Any] = {"gbit": (0.3, 1, 3, 10), "batch": (256, 1024), "dim": (16, 64)}
    settings |= {"starts": 5, "turns": 25}
    if options.quick:
        settings = {"gbit": (1,), "batch": (256,), "dim": (64,), "starts": 1, "turns": 2}
    before = record.environment()
    costs = ProfiledCosts(load_profile(options.profile))
    results = []
    for gbit in settings["gbit"]:
        network = Network(gbit, of_rank=True, burst=128 if gbit <= 3 else 256)
        for (batch, dim), ms in _measured(network, settings).items():
            simulated, chosen = predict(costs, network, batch, dim)
            cell = {"gbit": gbit, "batch": batch, "dim": dim, "chosen": chosen}
            results.append({**cell, "ms": ms, "simulated_ms": simulated})
    settings["profile"] = options.profile
    record.publish(options.json, "simulator_links", before, settings, results, section)


def _measured(
    network: Network, settings: dict[str, Any]
) -> dict[tuple[int, int], dict[str, Spread]]:
    """Milliseconds by size and codec, to a microsecond, over all starts of the ranks."""
    count = settings["starts"]
    starts = [over_network(network, RANKS, _measure, settings) for _ in range(count)]
    return {
        size: {
            codec: Spread(
                [round(ms, 3) for start in starts for ms in start[size][codec].values_in_order]
            )
            for codec in CODECS
        }
        for size in starts[0]
    }


def _measure(rank: int, settings: dict[str, Any]) -> dict[tuple[int, int], dict[str, Spread]]:
    pin_to_core(rank)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {}
    for batch, dim in product(settings["batch"], settings["dim"]):
        model = model_of(batch, dim)
        plan, steps = plan_of(model), {}
        for codec in CODECS:
            codecs = None if codec == "fp32" else CodecConfig(forward=codec)
            config = BLSConfig(transport="tcp", deadline=120, codecs=codecs)
            sharder = BLSEmbeddingBagCollectionSharder(config=config)
            batches = [batch_of(model, rank, number) for number in range(BATCHES)]
            step = step_of(model, plan, [sharder], batches, training=False)
            for _ in range(_WARM_UPS):
                step()
            steps[codec] = partial(slowest_ms, step)
        found[batch, dim] = in_turns(steps, settings["turns"], f"{batch} x {dim}")
    return found


def model_of(batch: int, dim: int) -> StepModel:
    """26 tables with an id of each sample."""
    table = TableConfiguration(rows=HOT_ROWS, dim=dim, pooling=1.0, skew=0.0)
    return StepModel("26 tables", (Collection(True, (table,) * TABLES),), batch, seed=1)


def plan_of(model: StepModel) -> list[PlacedTable]:
    """Whole tables, on one rank after the other."""
    return [
        PlacedTable(table, TABLE_WISE, (PlacedShard(number % RANKS, table.rows, table.dim),))
        for number, table in enumerate(model.workload(RANKS).tables)
    ]


def predict(
    costs: ProfiledCosts, network: Network, batch: int, dim: int
) -> tuple[dict[str, float], str]:
    """Milliseconds by codec, simulated, and the codec that is chosen."""
    model = model_of(batch, dim)
    workload = model.workload(RANKS)
    job = model.job(RANKS, RANKS, "bls", training=False)
    host = costs.host("bls", training=False, world_size=RANKS, ranks_per_core=1.0)
    if host is None:
        raise SystemExit("the profile has no host costs: calibrate again")
    rate, burst = network.gbit * _GBIT_IN_BYTES_PER_US, 1024 * network.burst_kib
    link = Link.of_hosts(rate, RANKS, per_host=1, burst_bytes=burst)
    simulation = Simulation(
        Ranks(RANKS, (1,) * RANKS, tuple(range(RANKS)), link=link),
        read_delays("none"),
        batches=_FEW_BATCHES,
        host=host.costs,
        codecs=measure_codecs(CODECS, dim),
    )
    outcomes = simulate_bounds(plan_of(model), workload, job, costs, [0], simulation)
    # The first step, as measured: after a pause the whole burst passes at once.
    first = [replace(each, step_us=_first_step_us(each.timeline)) for each in outcomes]
    return {each.codec: each.step_us / 1e3 for each in first}, choose_codec(first).codec


def _first_step_us(timeline: Timeline) -> float:
    last = timeline.graph.called("dense forward")
    return float(timeline.end[last[timeline.graph.step[last] == 0]].max())


def section(run: dict[str, Any]) -> str:
    """A row for each link and size, and how good the chosen codecs are."""
    rows, regrets = [], []
    for each in run["results"]:
        ms = {codec: each["ms"][codec]["median"] for codec in CODECS}
        regrets.append(ms[each["chosen"]] / min(ms.values()) - 1)
        errors = {codec: 100 * (each["simulated_ms"][codec] / ms[codec] - 1) for codec in CODECS}
        cells = [f"{ms[codec]:.2f} ({errors[codec]:+.0f} %)" for codec in CODECS]
        size = [each["gbit"], each["batch"], each["dim"]]
        rows.append([*size, *cells, each["chosen"], f"{100 * regrets[-1]:.1f}"])
    near = sum(regret <= 0.05 for regret in regrets)
    header = ["Gbit/s a rank", "batch", "columns", *(f"{codec}, ms" for codec in CODECS)]
    summary = (
        f"The chosen codec is within 5 % of the best in {near} of {len(rows)} cells, mean regret "
        f"{100 * np.mean(regrets):.1f} %."
    )
    return page.section(run, summary, page.table([*header, "chosen", "regret, %"], rows))


if __name__ == "__main__":
    main()
