"""Exchanges between hosts without RDMA: channels over TCP, and gloo's all-to-alls."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered
from benchmarks.harness.networks import links_of_ranks, over_network
from benchmarks.harness.statistics import Spread, geometric_mean, ratio_of_medians, taking_turns
from torchrec_bls import BoundedLagChannel

KIB = 1024
FULL: dict[str, Any] = {
    "ranks": [2, 4],
    "gbit": [None, 1.0, 3.0, 10.0],
    "bytes": [8, 4 * KIB, 32 * KIB, 256 * KIB, 1024 * KIB, 8192 * KIB],
    "compute_ms": [0, 5, 50],
    "bounds": [0, 2],
    "turns": 12,
    "seconds": 0.15,
}
QUICK = FULL | {"ranks": [2], "gbit": [None], "bytes": [8, 256 * KIB], "compute_ms": [0, 1]}
QUICK |= {"turns": 2, "seconds": 0.01}
# Slots of models have room for their messages; of larger ones nobody has slots.
_LARGEST_SLOT = 1024 * KIB
_HEADER = 256


class _Channel:
    """Steps over a channel: post, compute, wait for what was posted `bound` steps before."""

    def __init__(self, size: int, bound: int, compute_s: float) -> None:
        ranks = dist.get_world_size()
        self.channel = BoundedLagChannel(
            dist.group.WORLD,
            bound=bound,
            slot_bytes=min(size + _HEADER, _LARGEST_SLOT),
            transport="tcp",
            name=f"{size} {bound} {compute_s}",
        )
        self._message = [[torch.zeros(size, dtype=torch.uint8)]] * ranks
        self._ahead, self._bound, self._compute_s = 0, bound, compute_s
        dist.barrier()
        self.first_ms = 1e3 * self.step()

    def step(self) -> float:
        """Returns the seconds of a step, less those of computing."""
        began = time.perf_counter()
        self.channel.post(self._message)
        self._ahead += 1
        _compute(self._compute_s)
        if self._ahead > self._bound:
            self.channel.wait().release()
            self._ahead -= 1
        return time.perf_counter() - began - self._compute_s

    def end(self) -> None:
        """Waits for what is outstanding, and closes."""
        while self._ahead:
            self.channel.wait().release()
            self._ahead -= 1
        self.channel.close()


class _Gloo:
    """The same with asynchronous all-to-alls of a group."""

    def __init__(self, size: int, bound: int, compute_s: float) -> None:
        ranks = dist.get_world_size()
        self._sent = torch.zeros(size * ranks, dtype=torch.uint8)
        self._received = [torch.empty_like(self._sent) for _ in range(bound + 1)]
        self._calls: deque[Any] = deque()
        self._bound, self._compute_s = bound, compute_s
        dist.barrier()
        self.first_ms = 1e3 * self.step()

    def step(self) -> float:
        """Returns the seconds of a step, less those of computing."""
        began = time.perf_counter()
        place = self._received.pop(0)
        self._received.append(place)
        self._calls.append(dist.all_to_all_single(place, self._sent, async_op=True))
        _compute(self._compute_s)
        if len(self._calls) > self._bound:
            self._calls.popleft().wait()
        return time.perf_counter() - began - self._compute_s

    def end(self) -> None:
        """Waits for what is outstanding."""
        while self._calls:
            self._calls.popleft().wait()


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _sample(step: Callable[[], float], steps: int) -> tuple[float, float]:
    """Microseconds of a step on the slowest rank, and of all processors together."""
    dist.barrier()
    cpu = time.process_time()
    us = 1e6 * sum(step() for _ in range(steps)) / steps
    cpu = 1e6 * (time.process_time() - cpu) / steps
    slowest = gathered((us, cpu))
    return max(each[0] for each in slowest), sum(each[1] for each in slowest)


def measure_on_rank(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures all cells on a network."""
    results = []
    cells = product(settings["bytes"], settings["compute_ms"], settings["bounds"])
    for size, compute_ms, bound in cells:
        made = {name: kind(size, bound, compute_ms / 1e3) for name, kind in _KINDS.items()}
        once = max(_sample(each.step, 2)[0] for each in made.values()) / 1e6 + compute_ms / 1e3
        count = max(2, min(200, round(settings["seconds"] / once)))
        samplers = {name: partial(_sample, each.step, count) for name, each in made.items()}
        taken = taking_turns(samplers, settings["turns"])
        us = {name: Spread([each[0] for each in samples]) for name, samples in taken.items()}
        cpu = {name: Spread([each[1] for each in samples]) for name, samples in taken.items()}
        over = ratio_of_medians(us["tcp"].values_in_order, us["gloo"].values_in_order)
        results.append(
            {
                "bytes": size,
                "compute_ms": compute_ms,
                "bound": bound,
                "us": us,
                "cpu_us": cpu,
                "over": over,
                "first_ms": {name: max(gathered(each.first_ms)) for name, each in made.items()},
            }
        )
        for each in made.values():
            each.end()
    return results


def section(made: record.Record) -> str:
    """All cells, and what they are together."""
    rows, ratios = [], []
    for cell in made["results"]:
        low, ratio, high = cell["over"]
        ratios.append(ratio)
        us = [f"{cell['us'][name]['median']:.0f}" for name in _KINDS]
        cpu = [f"{cell['cpu_us'][name]['median']:.0f}" for name in _KINDS]
        first = [f"{cell['first_ms'][name]:.1f}" for name in _KINDS]
        rows.append(
            [
                cell["ranks"],
                "loopback" if cell["gbit"] is None else f"{cell['gbit']:g} Gbit/s",
                page.size(cell["bytes"]),
                cell["compute_ms"],
                cell["bound"],
                *us,
                f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                *cpu,
                *first,
            ]
        )
    header = ["ranks", "link", "message", "ms between", "bound", "channel", "gloo", "ratio"]
    header += ["CPU, channel", "CPU, gloo", "first, ms, channel", "first, ms, gloo"]
    mean = f" Geometric mean of the ratios: {geometric_mean(ratios)[1]:.3f}." * (len(ratios) > 1)
    return page.section(
        made,
        "Microseconds of a step on the slowest rank beside its computing: post, compute, wait for "
        "what was posted `bound` steps before; medians of the turns, and ratios of medians with "
        "their 95 % intervals by bootstrap. CPU is that of all ranks together, with computing."
        + mean,
        page.table(header, rows),
    )


_KINDS: dict[str, type[_Channel] | type[_Gloo]] = {"tcp": _Channel, "gloo": _Gloo}


def main() -> None:
    parser = record.parser(__doc__, quick="two ranks on loopback, two sizes, two turns")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else FULL
    before = record.environment()
    results = []
    for ranks, gbit, network in links_of_ranks(parser, settings):
        found = over_network(network, ranks, measure_on_rank, settings)
        results += [{"ranks": ranks, "gbit": gbit, **cell} for cell in found]
    record.publish(arguments.json, "over_tcp", before, settings, results, section)


if __name__ == "__main__":
    main()
