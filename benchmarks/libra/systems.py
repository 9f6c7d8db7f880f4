"""What the paper compares, under its model of contention."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.libra import baselines, networks
from benchmarks.libra.algorithm_1 import allocate_modes
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline

#: R: how many threads communication may have.
THREADS = tuple(128 * 2**power for power in range(6))
#: "one r" is the baseline that the paper left out: the best fusion with the best number of threads.
SYSTEMS = ("SE", "H-N", "MG-N", "LIBRA-M", "LIBRA", "one r", "MG-CF")


class Cluster(NamedTuple):
    """A hop's latency, the rate of many threads (gamma_1 of q), gamma_3, and by number in THREADS
    what NCCL takes; Horovod's window."""

    alpha_us: float
    gigabytes: float
    gamma_3: float
    nccl: int = THREADS.index(512)
    window_us: float = 5e3


class Network(NamedTuple):
    """An iteration is the backward and `rest` times its compute; of Eq. 5 alpha_2, alpha_1 being 1;
    the rate of transmission under overlap, over that alone."""

    name: str
    backward_us: float
    rest: float
    alpha_2: float
    slower: float


def modes(cluster: Cluster, network: Network, nodes: int, tree: bool = False) -> list[ModeTimes]:
    """Eqs. 3 to 6, nothing being sent without threads (gamma_2 = gamma_1), by ring (Eq. 4) or tree:
    the bytes up and down, a hop a level."""
    hops = 2 * math.ceil(math.log2(nodes)) if tree else 2 * (nodes - 1)
    volume = 2.0 if tree else 2 * (nodes - 1) / nodes
    found = []
    for threads in THREADS:
        rate = 1e3 * cluster.gigabytes * (1 - math.exp(-cluster.gamma_3 * threads**0.6))
        times = (hops * cluster.alpha_us, volume / rate, volume / rate / network.slower)
        found.append(ModeTimes(*times, compute_rate=1 - network.alpha_2 * threads))
    return found


def free(times: ModeTimes) -> ModeTimes:
    """Without contention."""
    return ModeTimes(times.startup_us, times.alone_us_per_byte, times.alone_us_per_byte, 1.0)


def horovod(layers: Sequence[Layer], window_us: float, mode: int) -> list[Group]:
    """What is ready within a window travels together, up to 64 MiB, Horovod's buffer."""
    groups, count, size, now = [], 0, 0, 0.0
    for layer in layers:
        after = now + layer.compute_us
        if count and (after // window_us > now // window_us or size + layer.bytes > 2**26):
            groups.append(Group(count, mode))
            count, size = 0, 0
        count, size, now = count + 1, size + layer.bytes, after
    return [*groups, Group(count, mode)]


def backwards(
    cluster: Cluster, network: Network, nodes: int = 8, names: Sequence[str] = SYSTEMS, **how: bool
) -> dict[str, tuple[float, float]]:
    """By system the microseconds of the backward, and those of it after the last gradient."""
    layers, mode = networks.layers(network.name, network.backward_us), cluster.nccl
    times = modes(cluster, network, nodes, **how)
    merged = baselines.mg_wfbp(layers, times, mode)
    plans: dict[str, Callable[[], list[Group]]] = {
        "SE": lambda: baselines.no_overlap(layers, mode),
        "H-N": lambda: horovod(layers, cluster.window_us, mode),
        "LIBRA-M": lambda: allocate_modes(layers, [group.layers for group in merged], times),
        "LIBRA": lambda: allocate(layers, times),
        "one r": lambda: baselines.best_single_mode(layers, times),
    }
    found = {}
    for name in names:
        plan = plans.get(name, lambda: merged)()
        ran = timeline(layers, plan, list(map(free, times)) if name == "MG-CF" else times)
        found[name] = (ran.finish, ran.finish - ran.ready[-1])
    return found
