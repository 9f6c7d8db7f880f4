"""Times all-reduces of gradients and a backward, each alone and beside the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_bls.codecs.rows import Codec
from torchrec_bls.collective.quantized import quantized_all_reduce
from torchrec_bls.overlap.modes.fitting import ModeSamples

#: Bytes of gradients: from 16 KiB to 32 MiB, each 2.3 times the one before.
SIZES = tuple(1024 * round(2 ** (4 + 11 * step / 9)) for step in range(10))
LEAST_ROUNDS, LEAST_SIZES = 5, 5

#: A mode of all backends, and those of backends that send from rank to rank: codecs.
FLOAT32 = "float32"
CODECS = {"uint8": Codec.UINT8, "uint4": Codec.UINT4}

# A sample is a sequence of all-reduces that takes about this long.
_SAMPLE_S, _MOST_CALLS, _PROBE_CALLS = 0.025, 100, 3
# Beside a backward.
_LEAST_BESIDE = 2
_BACKWARDS_ALONE = 3  # a round
_WORD_BYTES = 4

# Pieces of the backward: layers whose weights together are larger than a core's cache.
_LAYERS, _WIDTH, _BATCH = 8, 512, 64
# Values that share a scale, as in the hook of quantized all-reduces.
_COLUMNS = 256

AllReduce = Callable[[Tensor], object]


@dataclass(frozen=True)
class _Cell:
    """All-reduces of one mode and size, and how many of them make a sample, besides a first one."""

    mode: str
    bytes: int
    calls_alone: int
    calls_overlapped: int


class OverlapTimer:
    """Times a group's modes. Every rank makes one timer and calls it alike.

    The timer works as the hook of planned buckets does. One thread of each rank makes all-reduces
    in sequence. Meanwhile the main thread makes a backward of linear layers, on one thread. All
    ranks do the same at the same time. Where they share cores, their backwards take cores from each
    other as well. "A backward alone" is one on all ranks without an all-reduce.

    The first all-reduce of a sample does not count: it brings the ranks in step. Of all numbers the
    mean of all ranks counts: chance decides which of them gets more of a core within a sample.

    Args:
        group: group of ranks, with a backend that reduces float32.
        codecs: whether quantized all-reduces are measured too; the backend has to send and receive.
        seconds: time that rounds will be measured for. The largest sizes are left out if fewer than
            `LEAST_ROUNDS` would fit; the first `LEAST_SIZES` always stay.
        sizes: bytes of gradients, ascending multiples of 1024.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        codecs: bool,
        seconds: float,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(1, "torchrec_bls overlap")
        self._backward = _pieces()
        # Gradients are not in a core's own cache: one call after the other takes the next bytes.
        self._gradients, self._next = torch.randn(2 * sizes[-1] // _WORD_BYTES), 0
        self._modes: dict[str, AllReduce] = {FLOAT32: partial(_average, group=group)}
        if codecs:
            errors = torch.zeros(sizes[-1] // _WORD_BYTES)
            for name, codec in CODECS.items():
                self._modes[name] = partial(_quantized, group=group, codec=codec, errors=errors)
        self._cells: list[_Cell] = []
        self._rounds: list[_Round] = []
        planned_s = 0.0
        for size in sizes:
            cells = [self._probe(mode, size) for mode in self._modes]
            planned_s += sum(planned for _, planned in cells)
            if planned_s * LEAST_ROUNDS > seconds and len(self._sizes()) >= LEAST_SIZES:
                break
            self._cells += [cell for cell, _ in cells]

    def measure_until(self, end: float, least_rounds: int = LEAST_ROUNDS) -> None:
        """Makes rounds over all modes and sizes.

        Args:
            end: `time.monotonic()` after which no rank begins another one.
            least_rounds: number of rounds that are made in any case.
        """
        rounds, late = 0, False
        while rounds < least_rounds or not late:
            self._rounds.append(self._round())
            rounds += 1
            late = self._slowest([float(time.monotonic() >= end)])[0] > 0

    def samples(self) -> dict[str, ModeSamples]:
        """Returns what was measured by mode, the same on all ranks."""
        samples = {}
        for mode in self._modes:
            cells = [number for number, cell in enumerate(self._cells) if cell.mode == mode]
            samples[mode] = ModeSamples(
                np.asarray(self._sizes(), dtype=np.float64),
                np.stack([each.alone_us[cells] for each in self._rounds]),
                np.stack([each.overlapped_us[cells] for each in self._rounds]),
                np.stack([each.compute_rate[cells] for each in self._rounds]),
            )
        return samples

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _sizes(self) -> list[int]:
        return sorted({cell.bytes for cell in self._cells})

    def _probe(self, mode: str, size: int) -> tuple[_Cell, float]:
        """Returns a cell, and the seconds that it takes in a round."""
        self._alone_s(mode, size, 1)
        alone_s = self._alone_s(mode, size, _PROBE_CALLS)
        overlapped_s, _ = self._beside(mode, size, _PROBE_CALLS)
        each_s = self._slowest([alone_s / _PROBE_CALLS, overlapped_s / _PROBE_CALLS]).tolist()
        calls = [max(1, min(_MOST_CALLS, round(_SAMPLE_S / seconds))) for seconds in each_s]
        calls[1] = max(calls[1], _LEAST_BESIDE)
        planned_s = sum((1 + count) * seconds for count, seconds in zip(calls, each_s, strict=True))
        return _Cell(mode, size, *calls), planned_s

    def _round(self) -> _Round:
        """Makes a sample of each cell in an order of its own, the same on all ranks."""
        cells = self._cells
        alone_s, overlapped_s, pieces = np.zeros((3, len(cells)))
        backward = 0.0
        todo = [("backward", 0)] * _BACKWARDS_ALONE
        todo += product(("alone", "overlapped"), range(len(cells)))
        for number in np.random.default_rng(len(self._rounds)).permutation(len(todo)):
            what, index = todo[number]
            cell = cells[index]
            if what == "backward":
                backward += self._backward_alone() / _BACKWARDS_ALONE
            elif what == "alone":
                calls = cell.calls_alone
                alone_s[index] = self._alone_s(cell.mode, cell.bytes, calls) / calls
            else:
                calls = cell.calls_overlapped
                seconds, done = self._beside(cell.mode, cell.bytes, calls)
                overlapped_s[index], pieces[index] = seconds / calls, done / seconds
        progress = self._mean([*pieces, backward])
        return _Round(
            1e6 * self._mean([*alone_s]),
            1e6 * self._mean([*overlapped_s]),
            progress[:-1] / progress[-1],
        )

    def _alone_s(self, mode: str, size: int, calls: int) -> float:
        """Returns the seconds of so many all-reduces behind another one."""
        dist.barrier(self._group)
        _, first, *_, end = self._thread.submit(self._reduce, mode, size, 1 + calls).result()
        return end - first

    def _beside(self, mode: str, size: int, calls: int) -> tuple[float, float]:
        """Makes so many all-reduces behind another one, all beside a backward.

        Returns:
            Their seconds, and pieces of the backward done meanwhile.
        """
        dist.barrier(self._group)
        reached = [time.perf_counter()]
        reducing = self._thread.submit(self._reduce, mode, size, 1 + calls)
        while not reducing.done():
            next(self._backward)()
            reached.append(time.perf_counter())
        _, first, *_, end = reducing.result()
        done = np.interp([first, end], reached, np.arange(len(reached)))
        return end - first, float(np.diff(done)[0])

    def _backward_alone(self) -> float:
        """Returns pieces a second."""
        dist.barrier(self._group)
        next(self._backward)()
        begin, pieces, seconds = time.perf_counter(), 0, 0.0
        while seconds < _SAMPLE_S:
            next(self._backward)()
            pieces += 1
            seconds = time.perf_counter() - begin
        return pieces / seconds

    def _reduce(self, mode: str, size: int, calls: int) -> list[float]:
        """Returns when the first all-reduce began, and when each ended."""
        times = [time.perf_counter()]
        for _ in range(calls):
            self._modes[mode](self._bucket(size))
            times.append(time.perf_counter())
        return times

    def _bucket(self, size: int) -> Tensor:
        count = size // _WORD_BYTES
        begin = self._next if self._next + count <= len(self._gradients) else 0
        self._next = begin + count
        return self._gradients[begin : self._next]

    def _slowest(self, numbers: list[float]) -> npt.NDArray[np.float64]:
        return self._over_ranks(numbers, dist.ReduceOp.MAX)

    def _mean(self, numbers: list[float]) -> npt.NDArray[np.float64]:
        return self._over_ranks(numbers, dist.ReduceOp.SUM) / dist.get_world_size(self._group)

    def _over_ranks(self, numbers: list[float], operation: object) -> npt.NDArray[np.float64]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self._group)
        result: npt.NDArray[np.float64] = tensor.numpy()
        return result


@dataclass(frozen=True)
class _Round:
    """A sample of each cell: fields of `ModeSamples`, (cells,)."""

    alone_us: npt.NDArray[np.float64]
    overlapped_us: npt.NDArray[np.float64]
    compute_rate: npt.NDArray[np.float64]


def _average(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """What DistributedDataParallel does with a bucket."""
    buffer.div_(dist.get_world_size(group))
    dist.all_reduce(buffer, group=group)


def _quantized(buffer: Tensor, group: dist.ProcessGroup, codec: Codec, errors: Tensor) -> None:
    """What the hook of quantized all-reduces does with a bucket, errors compensated."""
    kept = errors[: len(buffer)]
    rows = (buffer / dist.get_world_size(group)).view(-1, _COLUMNS)
    # The hook gathers the errors of parameters, and keeps them again.
    error = kept.clone().view(-1, _COLUMNS)
    quantized_all_reduce(rows, group, codec=codec, error=error)
    buffer.copy_(rows.view(-1))
    kept.copy_(error.view(-1))


def _pieces() -> Iterator[Callable[[], object]]:
    """Endlessly yields pieces of a backward, which end without having changed anything."""
    pieces = []
    for _ in range(_LAYERS):
        layer = nn.Linear(_WIDTH, _WIDTH)
        source = torch.randn(_BATCH, _WIDTH, requires_grad=True)
        output = layer(source).relu()
        pieces.append(
            partial(
                torch.autograd.grad,
                output,
                [source, *layer.parameters()],
                torch.full_like(output, 1e-3),
                retain_graph=True,
            )
        )
    return cycle(pieces)
