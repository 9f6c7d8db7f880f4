"""Codecs on slow links: forwards measured, and the codec that a simulation takes.

Suite D of the study. Two ranks with a core each and a link each, limited to rates that TCP and the
cores can keep up with; 26 tables, over the transport `c10d`. Codecs take turns. The ranks are
started several times: where their memory lies changes a forward of a millisecond by up to a third.
"""

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem import tables
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.simulation.bounds import Simulation, simulate_bounds
from torchrec_bls.sharding.simulation.choose_codec import choose_codec
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.program import Ranks
from torchrec_bls.sharding.simulation.wire.link import Link

from benchmarks.harness import page, record
from benchmarks.harness.launch import pin_to_core, slowest_ms
from benchmarks.harness.networks import Network, check_rights, over_network
from benchmarks.harness.statistics import Spread, in_turns
from benchmarks.modules.models import HOT_ROWS, TABLES, Case, ids_of, sharded
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig
from torchrec_bls.cli.codec_costs import codec_costs

RANKS = 2
CODECS = ("fp32", "uint8", "uint4")
_GBIT_IN_BYTES_PER_US = 125.0


def main() -> None:
    parser = record.parser(__doc__, quick="one rate, one batch, few calls")
    parser.set_defaults(json=Path("out/simulator_links.json"))
    parser.add_argument("--profile", required=True, help="of this machine, with host costs")
    check_rights(parser)
    options = parser.parse_args()
    settings: dict[str, Any] = {"gbit": (0.3, 1, 3, 10), "batch": (256, 1024), "dim": (16, 64)}
    settings |= {"starts": 5, "turns": 9, "repetitions": 10}
    if options.quick:
        settings = {"gbit": (1,), "batch": (256,), "dim": (64,), "starts": 1, "turns": 2}
        settings |= {"repetitions": 2}
    before = record.environment()
    costs = ProfiledCosts(load_profile(options.profile))
    results = []
    for gbit in settings["gbit"]:
        network = Network(gbit, of_rank=True)
        for (batch, dim), ms in _measured(network, settings).items():
            simulated, chosen = predict(costs, network, batch, dim)
            cell = {"gbit": gbit, "batch": batch, "dim": dim, "chosen": chosen}
            results.append({**cell, "ms": ms, "simulated_ms": simulated})
    settings["profile"] = options.profile
    record.publish(options.json, "simulator_links", before, settings, results, section)


def _measured(
    network: Network, settings: dict[str, Any]
) -> dict[tuple[int, int], dict[str, Spread]]:
    """Milliseconds by size and codec, over all starts of the ranks."""
    count = settings["starts"]
    starts = [over_network(network, RANKS, _measure, settings) for _ in range(count)]
    return {
        size: {
            codec: Spread([ms for start in starts for ms in start[size][codec].values_in_order])
            for codec in CODECS
        }
        for size in starts[0]
    }


def _measure(rank: int, settings: dict[str, Any]) -> dict[tuple[int, int], dict[str, Spread]]:
    pin_to_core(rank)
    found = {}
    with torch.no_grad():
        for batch, dim in product(settings["batch"], settings["dim"]):
            case = Case("EBC", "table_wise", RANKS, batch, dim=dim)
            ids, calls = ids_of(case, rank), {}
            for codec in CODECS:
                codecs = None if codec == "fp32" else CodecConfig(forward=codec)
                config = BLSConfig(transport="c10d", deadline=120, codecs=codecs)
                sharder = BLSEmbeddingBagCollectionSharder(config)
                module = sharded(case, sharder, dist.group.WORLD, codec)
                call = partial(lambda module, ids: module(ids).wait(), module, ids)
                call()
                # One after the other, as simulated: a link's burst passes at once after a pause.
                calls[codec] = partial(slowest_ms, call, settings["repetitions"])
            found[batch, dim] = in_turns(calls, settings["turns"], f"{batch} x {dim}")
    return found


def predict(
    costs: ProfiledCosts, network: Network, batch: int, dim: int
) -> tuple[dict[str, float], str]:
    """Milliseconds by codec, simulated, and the codec that is chosen."""
    every = [tables.Table(f"t{number}", HOT_ROWS, dim, "m") for number in range(TABLES)]
    workload = tables.Workload(every, {t.path: tables.UniformReuse(HOT_ROWS, 1.0) for t in every})
    plan = [
        tables.PlacedTable(
            table, tables.TABLE_WISE, (tables.PlacedShard(number % RANKS, HOT_ROWS, dim),)
        )
        for number, table in enumerate(every)
    ]
    cores = len(os.sched_getaffinity(0))
    job = Job(RANKS, batch, [1 << 60] * RANKS, backend="bls", training=False, cores_per_host=cores)
    host = costs.host("bls", training=False, world_size=RANKS, ranks_per_core=1.0)
    if host is None:
        raise SystemExit("the profile has no host costs: calibrate again")
    rate, burst = network.gbit * _GBIT_IN_BYTES_PER_US, 1024 * network.burst_kib
    link = Link.of_hosts(rate, RANKS, per_host=1, burst_bytes=burst)
    simulation = Simulation(
        Ranks(RANKS, (1,) * RANKS, tuple(range(RANKS)), link=link),
        read_delays("none"),
        host=host.costs,
        codecs=codec_costs(",".join(CODECS), workload),
    )
    outcomes = simulate_bounds(plan, workload, job, costs, [0], simulation)
    simulated = {each.codec: each.step_us / 1e3 for each in outcomes}
    return simulated, choose_codec(outcomes).codec


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
