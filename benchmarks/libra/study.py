"""LIBRA's figures under its own model: whether they hold together, the missing baseline, Fig. 9."""

from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.libra import fit, networks, page
from benchmarks.libra.algorithm_1 import algorithm_1, allocate_modes
from benchmarks.libra.baselines import mg_wfbp
from benchmarks.libra.systems import Cluster, Network, backwards, free, modes
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline

NODES = [16 * 2**power for power in range(8)]
#: A search begins with the rest of an iteration as the forward alone, half of the backward.
SEEDS, STEPS = 2, 800


def scaling(cluster: Cluster, network: Network, nodes: list[int], tree: bool) -> dict[str, Any]:
    """Fig. 9: throughput of a node over that of one alone."""
    of_nodes = [backwards(cluster, network, count, tree=tree) for count in nodes]
    alone, rest = (1 + network.rest) * network.backward_us, network.rest * network.backward_us
    relative = {name: [alone / (rest + us[name][0]) for us in of_nodes] for name in of_nodes[0]}
    return {"network": network.name, "tree": tree, "relative": relative}


def at_8_nodes(cluster: Cluster, network: Network) -> dict[str, Any]:
    """The backward in ms, and by how many percent Algorithm 1 and MG-WFBP miss their optimum."""
    layers = networks.layers(network.name, network.backward_us)
    times = modes(cluster, network, 8)
    theirs, fused = algorithm_1(layers, times), mg_wfbp(layers, [free(times[cluster.nccl])])
    over = [_over(layers, theirs, times), _over(layers, fused, [free(times[cluster.nccl])])]
    ms = {name: us / 1e3 for name, (us, _) in backwards(cluster, network).items()}
    return {"network": network.name, "ms": ms, "groups": len(allocate(layers, times)), "over": over}


def _over(layers: list[Layer], plan: list[Group], times: list[ModeTimes]) -> float:
    best = timeline(layers, allocate(layers, times), times).finish
    return 100 * (timeline(layers, plan, times).finish / best - 1)


def shared_cores() -> dict[str, float]:
    """Milliseconds where compute and communication together have a third of their pace each."""
    layers, times = [Layer(10_000.0, 2_000_000)] * 8, [ModeTimes(100.0, 0.005, 0.015, 1 / 3)]
    plans = {
        "given": allocate_modes(layers, [1] * 8, times),
        "held": [Group(1, 0, hold=7 - number) for number in range(8)],
        "free": algorithm_1(layers, times),
        "best": allocate(layers, times),
    }
    return {name: timeline(layers, plan, times).finish / 1e3 for name, plan in plans.items()}


def main() -> None:
    options = record.parser(__doc__, quick="few steps, and 16 and 2,048 nodes").parse_args()
    before = record.environment()
    steps, seeds, nodes = (3, 1, NODES[::7]) if options.quick else (STEPS, SEEDS, NODES)
    with ProcessPoolExecutor() as pool:

        def best(rest: float | None, begin: fit.Fit | None = None) -> fit.Fit:
            how = (repeat(rest, seeds), repeat(steps), range(seeds), repeat(begin))
            return min(pool.map(fit.search, *how), key=lambda each: each.misfit)

        forward_alone = best(0.5)
        fits = [best(None, forward_alone), forward_alone]
    cluster, of, *_ = fits[0]
    cells = [(network, tree) for tree in (False, True) for network in of]
    results = {
        "fits": [
            {
                "misfit": each.misfit,
                "cluster": each.cluster,
                "networks": each.networks,
                "percent": fit.statistics(each.networks, each.found).tolist(),
            }
            for each in fits
        ],
        "at_8": [at_8_nodes(cluster, network) for network in tqdm(of, desc="8 nodes")],
        "scaling": [
            scaling(cluster, *cell[:1], nodes, cell[1]) for cell in tqdm(cells, desc="Fig. 9")
        ],
        "shared_cores": shared_cores(),
    }
    settings = {"steps": steps, "seeds": seeds, "nodes": nodes}
    record.publish(options.json, "libra", before, settings, results, page.section)
    if options.json:
        page.plot(options.json.with_suffix(".png"), record.read(options.json))


if __name__ == "__main__":
    main()
