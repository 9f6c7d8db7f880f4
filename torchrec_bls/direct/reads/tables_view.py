"""The tables of one generation, as lookups read them: by the CPU, or by a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration, PlacedFeature
from torchrec_bls.direct.gpu.capture import copied
from torchrec_bls.direct.gpu.reader import GpuReader, Launch
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.strips import WORD_BYTES, Strip
from torchrec_bls.direct.gpu.under_way import ForwardsUnderWay
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.outputs.output_memory import empty_output


@dataclass(frozen=True, slots=True)
class TablesView(ABC):
    """What one lookup reads, and where its output is born. Nothing of it ever changes, so that a
    lookup which holds it needs no lock: neither a switch nor another thread's batch touches it.

    Attributes:
        where: name of the module and its rank, for messages.
        generation: generation that is read.
        keys: keys of the batch, in their order.
        lookups: lookups of the batch, in the order of the output.
        order: places of their features among the keys.
        dtype: dtype of the weights.
    """

    where: str
    generation: FloatGeneration
    keys: Sequence[str]
    lookups: Sequence[FeatureLookup]
    order: Sequence[int]
    dtype: torch.dtype

    @abstractmethod
    def next(self, generation: FloatGeneration) -> "TablesView":
        """Returns the view of another generation for the same keys."""

    @abstractmethod
    def rows(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """Returns the rows of all ids, feature by feature, [ids, columns] of `dtype`."""

    @abstractmethod
    def sums(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """Returns the pooled rows of all bags, float32 [samples, columns]."""

    @abstractmethod
    def beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor where the outputs are: the same one if it is there, or a copy."""

    @abstractmethod
    def copy_beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor where the outputs are."""


@dataclass(frozen=True, slots=True)
class HostView(TablesView):
    """A view that the CPU reads.

    Attributes:
        placed: the features with their places in the window, which are the same in all generations.
        features: the features for native code; they keep the generation's memory.
        rows_read: rows read of each rank's shards, in all batches, int64 [ranks]; added to.
    """

    placed: Sequence[PlacedFeature]
    features: _native.ShardedFeatures
    rows_read: torch.Tensor

    def next(self, generation: FloatGeneration) -> "HostView":
        """See TablesView."""
        features = _native.ShardedFeatures(self.placed, generation.window)
        return replace(self, generation=generation, features=features)

    def rows(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """See TablesView."""
        out = empty_output((_ids_of(batch, self.order), columns), self.dtype)
        values = batch.features.values()
        _native.copy_rows_directly(self.features, values, batch.counts, self.rows_read, out)
        return out

    def sums(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """See TablesView."""
        features = batch.features
        out = empty_output((features.stride(), columns), torch.float32)
        _native.sum_rows_directly(
            self.features,
            features.lengths(),
            features.values(),
            features.weights_or_none(),
            features.stride(),
            batch.counts,
            self.rows_read,
            out,
        )
        return out

    def beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """See TablesView."""
        return tensor

    def copy_beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """See TablesView."""
        return tensor.clone()


@dataclass(frozen=True, slots=True)
class GpuView(TablesView):
    """A view that a GPU reads. The host waits for nothing.

    Attributes:
        under_way: forwards of the module, and the GPU.
        reader: its reads, of all generations.
        tables: tables of the generation.
    """

    under_way: ForwardsUnderWay
    reader: GpuReader
    tables: RegisteredTables

    def next(self, generation: FloatGeneration) -> "GpuView":
        """See TablesView."""
        assert generation.registered is not None
        return replace(self, generation=generation, tables=generation.registered)

    def rows(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """See TablesView."""
        out = self._empty((_ids_of(batch, self.order), columns), self.dtype)
        begins = torch.tensor([0, *batch.counts]).cumsum(0)
        ids = self.beside_output(batch.features.values())
        number = self.under_way.next_batch()
        launch = self.reader.copy_rows(self.tables, ids, self.beside_output(begins), out)
        self._check_later(launch, number, batch)
        return out

    def sums(self, batch: CheckedBatch, columns: int) -> torch.Tensor:
        """See TablesView."""
        features = batch.features
        out = self._empty((features.stride(), columns), torch.float32)
        weights = features.weights_or_none()
        number = self.under_way.next_batch()
        launch = self.reader.sum_rows(
            self.tables,
            self.beside_output(features.values()),
            self.beside_output(offsets_of(features.lengths())),
            None if weights is None else self.beside_output(weights),
            out,
        )
        self._check_later(launch, number, batch)
        return out

    def beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """See TablesView."""
        gpu = self.under_way.gpu
        return tensor if gpu.has(tensor) else copied(gpu, tensor)

    def copy_beside_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """See TablesView."""
        gpu = self.under_way.gpu
        return tensor.clone() if gpu.has(tensor) else copied(gpu, tensor)

    def _check_later(self, launch: Launch, number: int, batch: CheckedBatch) -> None:
        if batch.is_on_gpu:
            ids, version = batch.features.values().numel(), self.generation.version
            self.under_way.check_later([launch], number, version, self.keys, ids)

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.under_way.gpu.device)


class GenerationViews:
    """The view of one generation for the keys of the last batch.

    Args:
        generation: the generation.
        make: function that returns a view of a generation for a batch's keys.

    Attributes:
        generation: see above.
    """

    def __init__(
        self,
        generation: FloatGeneration,
        make: Callable[[FloatGeneration, Sequence[str]], TablesView],
    ) -> None:
        self.generation = generation
        self._make = make
        self._last: TablesView | None = None

    def of(self, keys: Sequence[str]) -> TablesView:
        """Returns the view for a batch with `keys`."""
        view = self._last
        if view is None or keys != view.keys:
            self._last = view = self._make(self.generation, keys)
        return view

    def next(self, generation: FloatGeneration) -> "GenerationViews":
        """Returns the views of another generation, with that of the last batch's keys made."""
        views = GenerationViews(generation, self._make)
        last = self._last
        if last is not None:
            views._last = last.next(generation)
        return views


def strips_of(
    generation: FloatGeneration, lookups: Sequence[FeatureLookup], pooled: bool
) -> list[list[Strip]]:
    """Returns the strips of each lookup, with places among the bytes of a generation.

    The columns of an output are float32, or words of rows of any type.

    Args:
        generation: the generation.
        lookups: the lookups, in the order of the output.
        pooled: whether the rows of a bag are pooled.
    """
    return [
        [
            Strip(
                key,
                (column_byte + (out_byte if pooled else 0)) // WORD_BYTES,
                row_bytes // WORD_BYTES,
                row_bytes,
                sum(rows for _, _, rows in blocks),
                rows_per_block,
                means,
                [place for _, place, _ in blocks],
            )
            for column_byte, row_bytes, rows_per_block, blocks in pieces
        ]
        for key, out_byte, means, pieces in generation.placed(lookups)
    ]


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Returns where bags begin and end, int64, on the device of their lengths. FBGEMM's build for
    CPUs can't do that on a GPU, as KeyedJaggedTensor.offsets() has it."""
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _ids_of(batch: CheckedBatch, order: Sequence[int]) -> int:
    return sum([batch.counts[key] for key in order])
