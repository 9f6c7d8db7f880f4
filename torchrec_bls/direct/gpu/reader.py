"""One GPU's reads of a module's tables."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from torchrec_bls.direct.gpu.capture import capture_here
from torchrec_bls.direct.gpu.cuda import Event
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.report import BadId, first_bad_id
from torchrec_bls.direct.gpu.strips import Strip, Strips
from torchrec_bls.lifetime import new_lock


@dataclass
class Launch:
    """Reads that were launched.

    Attributes:
        reader: reader of the tables.
        report: report of bad ids, int64 [programs, 3], which is written by then.
        done: event behind them; None: they are in a CUDA graph, and each replay does them again.
    """

    reader: "GpuReader"
    report: torch.Tensor
    done: Event | None = None

    def is_done(self) -> bool:
        """Returns whether the rows are read."""
        assert self.done is not None
        return self.done.query()

    def wait(self) -> None:
        """Waits until the rows are read."""
        assert self.done is not None
        self.done.synchronize()

    def bad_id(self) -> BadId | None:
        """Waits until the rows are read, and returns the first id that has none."""
        self.wait()
        return first_bad_id(self.report)


class GpuReader:
    """Reads the rows of batches by kernels, on a stream of its own. The host waits for nothing.

    Any number of threads may read, each in a version of its own. Triton is imported here, and
    nowhere before.

    Args:
        gpu: the GPU.
        tables: tables of any version, registered with the GPU.
        features: strips of each feature, in the order of the output. In place of addresses they
            have places among the bytes of the tables, the same in all versions.
        bits: see Strips.

    Attributes:
        launching: held by the thread that launches reads, from the choice of a version on.

    Raises:
        ValueError: rows are not of whole words of 4 bytes.
    """

    def __init__(
        self,
        gpu: Gpu,
        tables: RegisteredTables,
        features: Sequence[Sequence[Strip]],
        bits: int,
    ) -> None:
        from torchrec_bls.direct.gpu.kernels.sequences import copy_rows, decode_rows
        from torchrec_bls.direct.gpu.kernels.sums import sum_bags

        self._sum_bags, self._copy_rows, self._decode_rows = sum_bags, copy_rows, decode_rows
        self._gpu = gpu
        strips = [strip for each in features for strip in each]
        self._places = [place for strip in strips for place in strip.blocks]
        placed = [
            replace(strip, blocks=[tables.address + place for place in strip.blocks])
            for strip in strips
        ]
        self._strips = Strips(placed, bits, gpu.device)
        # Whoever reads keeps the tables. This one would keep them after a switch.
        self._shown = weakref.ref(tables)
        of_strips = [number for number, each in enumerate(features) for _ in each]
        keys = [each[0].key for each in features]
        self._feature_of_strip = torch.tensor(of_strips, dtype=torch.int64, device=gpu.device)
        self._key_of_feature = torch.tensor(keys, dtype=torch.int64, device=gpu.device)
        # A report has to stay as long as a kernel may write it, and so is kept before the launch.
        self._under_way: deque[Launch] = deque()
        self.launching = new_lock()

    def sum_rows(
        self,
        tables: RegisteredTables,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Launch:
        """Writes the pooled rows of all bags, of the version that `tables` are; see `sum_bags`."""
        used = [ids, offsets, out, *(() if weights is None else (weights,))]
        with self._reading(tables, used) as launch:
            self._sum_bags(self._strips, ids, offsets, weights, out, launch.report)
        return launch

    def copy_rows(
        self, tables: RegisteredTables, ids: torch.Tensor, begins: torch.Tensor, out: torch.Tensor
    ) -> Launch:
        """Writes the rows of all ids, feature by feature, of strips of 32 bits.

        Args:
            tables: the version.
            ids: ids key by key, int32 or int64 [ids].
            begins: places where the ids of each key begin, and their end, int64 [keys + 1].
            out: output, [rows, columns] of the tables' dtype, contiguous.
        """
        with self._reading(tables, [ids, begins, out]) as launch:
            words, out_begins = out.view(torch.int32), self._out_begins(begins)
            self._copy_rows(self._strips, ids, begins, out_begins, words, launch.report)
        return launch

    def decode_rows(
        self, tables: RegisteredTables, ids: torch.Tensor, begins: torch.Tensor, out: torch.Tensor
    ) -> Launch:
        """Writes the numbers of the rows of all ids, feature by feature; see `copy_rows`. The
        output is float32 or float16, [rows, columns]."""
        with self._reading(tables, [ids, begins, out]) as launch:
            out_begins = self._out_begins(begins)
            self._decode_rows(self._strips, ids, begins, out_begins, out, launch.report)
        return launch

    def _out_begins(self, begins: torch.Tensor) -> torch.Tensor:
        counts = begins.diff()[self._key_of_feature]
        return (counts.cumsum(0) - counts)[self._feature_of_strip]

    @contextmanager
    def _reading(self, tables: RegisteredTables, used: Iterable[torch.Tensor]) -> Iterator[Launch]:
        """Returns a context for one launch, which reads `tables`."""
        capture = capture_here()
        if capture is not None and capture.is_running:
            with self._gpu.reading(used):  # in the graph, of what is shown when it is replayed
                yield Launch(self, self._gpu.new_report_in_graph())
            return
        with self.launching, self._gpu.reading(used):
            self._forget_read()
            self._under_way.append(launch := Launch(self, self._gpu.new_report()))
            self.show(tables)
            yield launch
            launch.done = self._gpu.mark()

    def show(self, tables: RegisteredTables) -> None:
        """Makes later launches on the stream for reads, replays of CUDA graphs among them, read a
        version. Those before, by any thread, read the former one. The caller has `launching`, until
        it has launched what is to read the version."""
        if self._shown() is not tables:
            self._strips.move_to([tables.address + place for place in self._places])
            self._shown = weakref.ref(tables)

    def _forget_read(self) -> None:
        while self._under_way:
            first = self._under_way[0]
            if first.done is None:  # it was interrupted
                first.done = self._gpu.mark()
            if not first.is_done():
                return
            self._under_way.popleft()
