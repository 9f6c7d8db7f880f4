"""One GPU's reads of a module's float tables."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration
from torchrec_bls.direct.gpu.cuda import Event
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.registration import Registration, RegistrationError
from torchrec_bls.direct.gpu.report import BadId, first_bad_id
from torchrec_bls.direct.gpu.strips import WORD_BYTES, Strip, Strips
from torchrec_bls.lifetime import new_lock

#: Programs of a launch. From 16 on, a lookup of a batch takes no longer than with all SMs
#: (docs/design/gpu-reads.md).
PROGRAMS = 16


class RegisteredTables:
    """The tables of a generation, mapped once more for a GPU and registered with it.

    Args:
        gpu: the GPU.
        generation: the generation.

    Attributes:
        generation: see above.
        registration: the registration, to be closed when nothing reads the tables any more.
        address: address of the first byte, for the host and the GPU.

    Raises:
        RegistrationError: the GPU can't read them.
        BLSError: they can't be mapped.
    """

    def __init__(self, gpu: Gpu, generation: FloatGeneration) -> None:
        if generation.side is not None:  # their rows change, and nothing here pins them
            raise RegistrationError(
                f"version {generation.version!r} has tables that are refreshed by row, which GPUs "
                "do not read yet: publish whole versions, or look up on the CPU"
            )
        # That of the generation is private: the driver would copy its pages.
        window = _native.TableWindow(generation.pages, shared=True)
        ranges = []
        at = self.address = window.address
        for _, _, size in generation.pages:
            ranges.append((at, size))
            at += size
        self.generation = generation
        self.registration = Registration(gpu.cuda, ranges, window)


@dataclass(frozen=True)
class Launch:
    """Reads that were launched.

    Attributes:
        done: event behind them.
        report: report of bad ids, int64 [programs, 3], which is written by then.
    """

    done: Event
    report: torch.Tensor

    def bad_id(self) -> BadId | None:
        """Waits until the rows are read, and returns the first id that has none."""
        self.done.synchronize()
        return first_bad_id(self.report)


class GpuReader:
    """Reads the rows of batches by kernels, on a stream of its own. The host waits for nothing.

    Triton is imported here, and nowhere before.

    Args:
        gpu: the GPU.
        tables: tables to read.
        lookups: lookups of the batches, in the order of the output.
        pooled: whether the rows of a bag are pooled, which takes float32, or copied.
        programs: number of programs of a launch. Each takes a part of an SM from other work.

    Raises:
        ValueError: rows are not of whole words of 4 bytes.
    """

    def __init__(
        self,
        gpu: Gpu,
        tables: RegisteredTables,
        lookups: Sequence[FeatureLookup],
        pooled: bool,
        programs: int = PROGRAMS,
    ) -> None:
        from torchrec_bls.direct.gpu.kernels.sequences import copy_rows
        from torchrec_bls.direct.gpu.kernels.sums import sum_bags

        self._sum_bags, self._copy_rows = sum_bags, copy_rows
        self._gpu = gpu
        self._tables = tables
        self._lookups = list(lookups)
        self._pooled = pooled
        self._programs = programs
        self._strips = Strips(list(self._strips_of(tables)), 32, gpu.device)
        placed = tables.generation.placed(self._lookups)
        features = [number for number, (*_, columns) in enumerate(placed) for _ in columns]
        keys = [lookup.key for lookup in self._lookups]
        self._feature_of_strip = torch.tensor(features, dtype=torch.int64, device=gpu.device)
        self._key_of_feature = torch.tensor(keys, dtype=torch.int64, device=gpu.device)
        # A report has to stay as long as a kernel may write it.
        self._under_way: deque[Launch] = deque()
        self._noting = new_lock()

    def sum_rows(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Launch:
        """Writes the pooled rows of all bags; see `sum_bags`."""
        used = [ids, offsets, out, *(() if weights is None else (weights,))]
        report = self._gpu.new_report(self._programs)
        with self._gpu.reading(used):
            self._sum_bags(self._strips, ids, offsets, weights, out, report)
        return self._launched(report)

    def copy_rows(self, ids: torch.Tensor, begins: torch.Tensor, out: torch.Tensor) -> Launch:
        """Writes the rows of all ids, feature by feature.

        Args:
            ids: ids key by key, int32 or int64 [ids].
            begins: places where the ids of each key begin, and their end, int64 [keys + 1].
            out: output, [rows, columns] of the tables' dtype, contiguous.
        """
        report = self._gpu.new_report(self._programs)
        with self._gpu.reading([ids, begins, out]):
            counts = begins.diff()[self._key_of_feature]
            out_begins = (counts.cumsum(0) - counts)[self._feature_of_strip]
            words = out.view(torch.int32)
            self._copy_rows(self._strips, ids, begins, out_begins, words, report)
        return self._launched(report)

    def move_to(self, tables: RegisteredTables) -> RegisteredTables:
        """Makes later reads see another generation of the same tables.

        Reads that were launched before, by any thread, see the former one. So do replays of CUDA
        graphs on the caller's stream that were launched before.

        Returns:
            The former tables. Their registration can be closed, and waits for these reads then.
        """
        former = self._tables
        with self._gpu.reading([]):
            self._strips.move_to([at for strip in self._strips_of(tables) for at in strip.blocks])
        self._tables = tables
        former.registration.read_until(self._gpu.mark())
        return former

    def _launched(self, report: torch.Tensor) -> Launch:
        launch = Launch(self._gpu.mark(), report)
        self._tables.registration.read_until(launch.done)
        with self._noting:
            while self._under_way and self._under_way[0].done.query():
                self._under_way.popleft()
            self._under_way.append(launch)
        return launch

    def _strips_of(self, tables: RegisteredTables) -> Iterator[Strip]:
        # The columns of an output are float32, or words of rows of any type.
        for key, out_byte, means, pieces in tables.generation.placed(self._lookups):
            for column_byte, row_bytes, rows_per_block, blocks in pieces:
                first = column_byte + (out_byte if self._pooled else 0)
                yield Strip(
                    key,
                    first // WORD_BYTES,
                    row_bytes // WORD_BYTES,
                    row_bytes,
                    sum(rows for _, _, rows in blocks),
                    rows_per_block,
                    means,
                    [tables.address + place for _, place, _ in blocks],
                )
