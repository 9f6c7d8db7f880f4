"""Exchanges between hosts without RDMA: channels over TCP, those over gloo, and gloo itself."""

import time
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
TRANSPORTS = ("tcp", "c10d")
# Slots of models have room for their messages; of larger ones nobody has slots.
_LARGEST_SLOT = 1024 * KIB
_HEADER = 256


class _Channel:
    """Steps over a channel: post, compute, wait for what was posted `bound` steps before."""

    def __init__(self, transport: str, size: int, bound: int, compute_s: float) -> None:
        ranks = dist.get_world_size()
        began = time.perf_counter()
        self.channel = BoundedLagChannel(
            dist.group.WORLD,
            bound=bound,
            slot_bytes=min(size + _HEADER, _LARGEST_SLOT),
            transport=transport,
            name=f"{transport} {size} {bound} {compute_s}",
        )
        self._message = [[torch.zeros(size, dtype=torch.uint8)]] * ranks
        self._ahead, self._bound, self._compute_s = 0, bound, compute_s
        self.made_ms = 1e3 * (time.perf_counter() - began)
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


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _gloo_step(sent: torch.Tensor, received: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_to_all_single(received, sent)
    return time.perf_counter() - began


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
        channels = {each: _Channel(each, size, bound, compute_ms / 1e3) for each in TRANSPORTS}
        steps: dict[str, Callable[[], float]] = {n: c.step for n, c in channels.items()}
        if not compute_ms and not bound:
            memory = torch.zeros(size * dist.get_world_size(), dtype=torch.uint8)
            steps["gloo"] = partial(_gloo_step, memory, torch.empty_like(memory))
        once = max(_sample(step, 2)[0] for step in steps.values()) / 1e6 + compute_ms / 1e3
        count = max(2, min(200, round(settings["seconds"] / once)))
        samplers = {name: partial(_sample, step, count) for name, step in steps.items()}
        taken = taking_turns(samplers, settings["turns"])
        us = {name: Spread([each[0] for each in samples]) for name, samples in taken.items()}
        cpu = {name: Spread([each[1] for each in samples]) for name, samples in taken.items()}
        over = ratio_of_medians(us["tcp"].values_in_order, us["c10d"].values_in_order)
        results.append(
            {
                "bytes": size,
                "compute_ms": compute_ms,
                "bound": bound,
                "us": us,
                "cpu_us": cpu,
                "over": over,
                "first_ms": {name: max(gathered(c.first_ms)) for name, c in channels.items()},
            }
        )
        for channel in channels.values():
            channel.end()
    return results


def section(made: record.Record) -> str:
    """All cells, and what they are together."""
    rows, ratios = [], []
    for cell in made["results"]:
        low, ratio, high = cell["over"]
        ratios.append(ratio)
        us = [f"{cell['us'][name]['median']:.0f}" if name in cell["us"] else "" for name in _NAMES]
        cpu = [f"{cell['cpu_us'][name]['median']:.0f}" for name in TRANSPORTS]
        first = [f"{cell['first_ms'][name]:.1f}" for name in TRANSPORTS]
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
    header = ["ranks", "link", "message", "ms between", "bound", *_NAMES, "TCP over c10d"]
    header += ["CPU, TCP", "CPU, c10d", "first, ms, TCP", "first, ms, c10d"]
    mean = f" Geometric mean of the ratios: {geometric_mean(ratios)[1]:.3f}." * (len(ratios) > 1)
    return page.section(
        made,
        "Microseconds of a step on the slowest rank beside its computing: post, compute, wait for "
        "what was posted `bound` steps before; medians of the turns, and ratios of medians with "
        "their 95 % intervals by bootstrap. CPU is that of all ranks together, with computing."
        + mean,
        page.table(header, rows),
    )


_NAMES = (*TRANSPORTS, "gloo")


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
