"""Exchanges between hosts without RDMA: channels over TCP, and all-to-alls of gloo and Open MPI."""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange import native
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
    "turns": 6,
    "seconds": 0.15,
}
QUICK = FULL | {"ranks": [2], "gbit": [None], "bytes": [8, 256 * KIB], "compute_ms": [0, 1]}
QUICK |= {"turns": 2, "seconds": 0.01}
# Slots of models have room for their messages; of larger ones nobody has slots.
_HEADER = 256
_LARGEST_SLOT = 1024 * KIB + _HEADER
_MPI_LIMIT_S = 300
# Steps of a sample, so that a window of bound 2 is full in some.
_FEWEST = 4
# Open MPI without shared memory, which ranks of a host would otherwise have.
_MPI_OVER_TCP = {"pml": "ob1", "btl": "tcp,self", "coll": "^sm"}

#: µs of a step on the slowest rank, and of all processors together.
Sample = tuple[float, float]


class _Window(ABC):
    """Exchanges with a window: a step posts, computes, and waits for what was posted `bound` steps
    before."""

    def __init__(self, bound: int, compute_s: float) -> None:
        self._ahead, self._bound, self._compute_s = 0, bound, compute_s
        dist.barrier()
        self.first_ms = 1e3 * self.run(1)

    def run(self, steps: int) -> float:
        """Returns the seconds of a step, less those of computing. Nothing is outstanding before and
        afterwards: it would go on while others have their turn."""
        began = time.perf_counter()
        for _ in range(steps):
            self._post()
            self._ahead += 1
            _compute(self._compute_s)
            if self._ahead > self._bound:
                self._wait_one()
        while self._ahead:
            self._wait_one()
        return (time.perf_counter() - began) / steps - self._compute_s

    def _wait_one(self) -> None:
        self._wait()
        self._ahead -= 1

    @abstractmethod
    def _post(self) -> None:
        """Begins an exchange."""

    @abstractmethod
    def _wait(self) -> None:
        """Waits for the oldest one."""

    @abstractmethod
    def end(self) -> None:
        """Lets go of what is needed no more."""


class _Channel(_Window):
    def __init__(self, size: int, bound: int, compute_s: float) -> None:
        ranks = dist.get_world_size()
        self._channel = BoundedLagChannel(
            dist.group.WORLD,
            bound=bound,
            slot_bytes=min(size + _HEADER, _LARGEST_SLOT),
            transport="tcp",
            name=f"{size} {bound} {compute_s}",
        )
        self._message = [[torch.zeros(size, dtype=torch.uint8)]] * ranks
        super().__init__(bound, compute_s)

    def _post(self) -> None:
        self._channel.post(self._message)

    def _wait(self) -> None:
        self._channel.wait().release()

    def end(self) -> None:
        self._channel.close()


class _Gloo(_Window):
    """Asynchronous all-to-alls of a group."""

    def __init__(self, size: int, bound: int, compute_s: float) -> None:
        self._sent = torch.zeros(size * dist.get_world_size(), dtype=torch.uint8)
        self._received = deque(torch.empty_like(self._sent) for _ in range(bound + 1))
        self._calls: deque[Any] = deque()
        super().__init__(bound, compute_s)

    def _post(self) -> None:
        self._calls.append(dist.all_to_all_single(self._received[0], self._sent, async_op=True))
        self._received.rotate(-1)

    def _wait(self) -> None:
        self._calls.popleft().wait()

    def end(self) -> None:
        """Has nothing to let go of."""


def _compute(seconds: float) -> None:
    # Of the processor: what threads of an exchange take from it makes the step longer.
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class OpenMpi:
    """Open MPI on loopback: other processes, so that a sweep of all cells is its turn."""

    def __init__(self, cells: list[tuple[int, int, int]], seconds: float) -> None:
        self._cells, self._seconds = cells, seconds
        ranks = dist.get_world_size()
        self._settings = native.mpi_yields(ranks)
        self._fastest: dict[tuple[int, int, int], str] = {}
        self._samples: dict[tuple[int, int, int], list[Sample]] = {}

    def sweep(self) -> None:
        """Takes a sample of each cell; after the first sweep with the setting that was its fastest
        there."""
        if not self._fastest:
            first = {name: self._run(each, self._cells) for name, each in self._settings.items()}
            for place, cell in enumerate(self._cells):
                taken = {name: samples[place] for name, samples in first.items()}
                self._fastest[cell] = min(taken, key=lambda name, taken=taken: taken[name][0])
                self._samples[cell] = [taken[self._fastest[cell]]]
            return
        for name, parameters in self._settings.items():
            cells = [cell for cell in self._cells if self._fastest[cell] == name]
            for cell, sample in zip(cells, self._run(parameters, cells), strict=True):
                self._samples[cell].append(sample)

    def samples(self, cell: tuple[int, int, int]) -> list[Sample]:
        """One for each sweep."""
        return self._samples[cell]

    def _run(self, parameters: dict[str, str], cells: list[tuple[int, int, int]]) -> list[Sample]:
        found: list[Sample] = []
        if dist.get_rank() == 0 and cells:  # all others wait in the kernel
            start = native.mpirun(dist.get_world_size(), _MPI_LIMIT_S, _MPI_OVER_TCP | parameters)
            program = [sys.executable, str(Path(__file__).with_name("mpi_windows.py"))]
            given = [str(number) for cell in cells for number in cell]
            command = [*start, *program, str(self._seconds), *given]
            found = json.loads(native.checked(command, _MPI_LIMIT_S).splitlines()[-1])
        return gathered(found)[0]


def _sample(window: _Window, steps: int) -> Sample:
    """Microseconds of a step on the slowest rank, and of all processors together."""
    dist.barrier()
    cpu = time.process_time()
    us = 1e6 * window.run(steps)
    cpu = 1e6 * (time.process_time() - cpu) / steps
    slowest = gathered((us, cpu))
    return max(each[0] for each in slowest), sum(each[1] for each in slowest)


def measure_on_rank(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures all cells on a network."""
    sizes, turns = settings["bytes"], settings["turns"]
    of_size = list(product(settings["compute_ms"], settings["bounds"]))
    cells = [(size, *cell) for size in sizes for cell in of_size]
    mpi = OpenMpi(cells, settings["seconds"]) if settings["mpi"] else None
    results = []
    for size in sizes:
        for _ in range(turns // len(sizes) if mpi else 0):
            mpi.sweep()
        results += [_measure_cell(size, *cell, settings) for cell in of_size]
    for cell, result in zip(cells, results, strict=True):
        if mpi:
            us, cpu_us = zip(*mpi.samples(cell), strict=True)
            result["us"]["mpi"], result["cpu_us"]["mpi"] = Spread(us), Spread(cpu_us)
        tcp = result["us"]["tcp"].values_in_order
        result["over"] = {
            name: ratio_of_medians(tcp, us.values_in_order)
            for name, us in result["us"].items()
            if name != "tcp"
        }
    return results


def _measure_cell(
    size: int, compute_ms: int, bound: int, settings: dict[str, Any]
) -> dict[str, Any]:
    made = {name: kind(size, bound, compute_ms / 1e3) for name, kind in _KINDS.items()}
    once = max(_sample(each, 2)[0] for each in made.values()) / 1e6 + compute_ms / 1e3
    count = max(_FEWEST, min(200, round(settings["seconds"] / once)))
    samplers = {name: partial(_sample, each, count) for name, each in made.items()}
    taken = taking_turns(samplers, settings["turns"])
    for each in made.values():
        each.end()
    return {
        "bytes": size,
        "compute_ms": compute_ms,
        "bound": bound,
        "us": {name: Spread([each[0] for each in samples]) for name, samples in taken.items()},
        "cpu_us": {name: Spread([each[1] for each in samples]) for name, samples in taken.items()},
        "first_ms": {name: max(gathered(each.first_ms)) for name, each in made.items()},
    }


def section(made: record.Record) -> str:
    """By ranks, link and size: the ratios to each peer over all computing times and bounds."""
    cells = made["results"]
    compute_ms, bounds = _listed(made, "compute_ms"), _listed(made, "bounds")
    parts = [
        f"A step posts, computes for {compute_ms} ms, and waits for what was posted `bound` "
        f"({bounds}) steps before. Each cell has the geometric mean of the channel's time over "
        "the peer's, of "
        "the slowest rank and without computing: below 1 the channel is faster. Medians of the "
        "turns; all cells and their 95 % intervals by bootstrap are in the record."
    ]
    for name, label in _PEERS.items():
        ratios = _by_link_and_size(cells, lambda cell, name=name: cell["over"].get(name, (0, 0))[1])
        parts += [f"Over {label}:", ratios]
    cpu = _by_link_and_size(cells, lambda cell: _median_of(cell["cpu_us"]))
    parts += ["Processor time of all ranks, with computing, over gloo's:", cpu]
    first = _by_link_and_size(
        cells, lambda cell: cell["first_ms"]["tcp"] / cell["first_ms"]["gloo"]
    )
    parts += [
        "The first exchange of a channel, over the first one of gloo (with connections of before):",
        first,
    ]
    parts += ["Cells in which a peer was faster, by their intervals:", _faster(cells)]
    return page.section(made, *parts)


def _listed(made: record.Record, setting: str) -> str:
    *first, last = map(str, made["settings"][setting])
    return f"{', '.join(first)} or {last}"


def _faster(cells: list[dict[str, Any]]) -> str:
    """A line for each peer, ranks and size."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for cell in cells:
        for name, label in _PEERS.items():
            low, ratio, _ = cell["over"].get(name, (0, 0, 0))
            if low > 1:
                how = f"{_link(cell)}, {cell['compute_ms']} ms, bound {cell['bound']} ({ratio:.2f})"
                found.setdefault((label, cell["ranks"], cell["bytes"]), []).append(how)
    lines = [
        f"- {label}, {ranks} ranks, {page.size(size)}: {'; '.join(of_size)}"
        for (label, ranks, size), of_size in sorted(found.items())
    ]
    return "\n".join(lines or ["None."])


def _by_link_and_size(cells: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float]) -> str:
    """A table of geometric means over the cells that have a ratio."""
    found: dict[tuple[int, str], dict[int, list[float]]] = {}
    for cell in cells:
        if value := ratio(cell):
            of_link = found.setdefault((cell["ranks"], _link(cell)), {})
            of_link.setdefault(cell["bytes"], []).append(value)
    sizes = list(dict.fromkeys(cell["bytes"] for cell in cells))
    rows = [
        [ranks, link, *(f"{geometric_mean(of_link[size])[1]:.2f}" for size in sizes)]
        for (ranks, link), of_link in found.items()
    ]
    return page.table(["ranks", "link", *map(page.size, sizes)], rows)


def _median_of(spreads: dict[str, Any]) -> float:
    return float(spreads["tcp"]["median"] / spreads["gloo"]["median"])


def _link(cell: dict[str, Any]) -> str:
    return "loopback" if cell["gbit"] is None else f"{cell['gbit']:g} Gbit/s"


_KINDS: dict[str, type[_Channel] | type[_Gloo]] = {"tcp": _Channel, "gloo": _Gloo}
_PEERS = {"gloo": "gloo", "mpi": "Open MPI"}


def main() -> None:
    parser = record.parser(__doc__, quick="two ranks on loopback, two sizes, two turns")
    arguments = parser.parse_args()
    settings = dict(QUICK if arguments.quick else FULL)
    settings["mpi"] = native.mpi_for_python()
    before = record.environment()
    results = []
    for ranks, gbit, network in links_of_ranks(parser, settings):
        mpi = None if network else settings["mpi"]
        found = over_network(network, ranks, measure_on_rank, settings | {"mpi": mpi})
        results += [{"ranks": ranks, "gbit": gbit, **cell} for cell in found]
    record.publish(arguments.json, "over_tcp", before, settings, results, section)


if __name__ == "__main__":
    main()
