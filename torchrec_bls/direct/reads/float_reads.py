"""Float tables of all ranks, as one module reads them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_bls import _native
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.generation import FeatureLookup, FloatGeneration, Generation
from torchrec_bls.direct.gpu.reader import GpuReader
from torchrec_bls.direct.gpu.under_way import ForwardsUnderWay
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.reads.direct_reads import DirectEmbeddings, DirectReads
from torchrec_bls.direct.reads.drained_view import DrainedView
from torchrec_bls.direct.reads.tables_view import (
    GenerationViews,
    GpuView,
    HostView,
    TablesView,
    strips_of,
)
from torchrec_bls.direct.steps import Content, content_in_memory
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck


class OutputForm(ABC):
    """The form of a module's output.

    Args:
        names: names of the embeddings, in the order of the output.
        kernel_means: tables whose bags are pooled to means when they are looked up.

    Attributes:
        pooled: whether the output is a KeyedTensor, not JaggedTensors by name.
        names: see above.
        kernel_means: see above.
    """

    pooled: ClassVar[bool]

    def __init__(self, names: Iterable[str], kernel_means: Iterable[str]) -> None:
        self.names = list(names)
        self.kernel_means = list(kernel_means)

    @abstractmethod
    def read(self, view: TablesView, batch: CheckedBatch) -> Any:
        """Returns the embeddings of a batch, for whose keys `view` is."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns a description. Another process that knows the tables makes the same form from
        it."""


class FloatReads(DirectReads[GenerationViews]):
    """The float tables that a module reads, in the order of its output.

    Args:
        where: see DirectReads.
        tables: tables in shared memory.
        generation: generation that is read.
        live: see DirectReads.
        rank: see DirectReads.
        configs: see DirectReads.
        form: form of the output.

    Attributes:
        tables: see above.
        form: see above.
    """

    tables: FloatTables
    _other_cure: ClassVar[str] = ', or shard with lookup="exchange" to train'

    def __init__(
        self,
        where: str,
        tables: FloatTables,
        generation: FloatGeneration,
        live: LiveWeights | None,
        rank: int | None,
        configs: Sequence[Any],
        form: OutputForm,
    ) -> None:
        super().__init__(where, tables, live, rank, configs)
        self.form = form
        self._view = self._views_of(generation, self.rows_read, self.under_way)

    @property
    def pooled(self) -> bool:
        """See DirectReads."""
        return self.form.pooled

    def output(self, batch: CheckedBatch) -> DirectEmbeddings:
        """See DirectReads."""
        self.check_serves()
        view = self._view.of(batch.features.keys())
        pin = self.pinned(view.generation)
        try:
            return DirectEmbeddings(self.form.read(view, batch), view.generation.version)
        finally:
            self.keep_until_read(pin)
            del pin  # an exception that somebody keeps would keep it

    def live_content(self) -> Content:
        """See DirectReads."""
        return content_in_memory([] if self.live is None else self.live.storages())

    def as_json(self) -> dict[str, Any]:
        """See DirectReads."""
        return self.form.as_json()

    def aside(self, generation: Generation, check: InputCheck) -> "FloatReads":
        """See DirectReads."""
        assert isinstance(generation, FloatGeneration)
        counts = torch.zeros_like(self.rows_read)
        under_way = self._none_under_way()
        view = self._views_of(generation, counts, under_way)
        made: FloatReads = self._aside(view, counts, under_way)
        return made

    def _views_of(
        self,
        generation: FloatGeneration,
        rows_read: torch.Tensor,
        under_way: ForwardsUnderWay | None,
    ) -> GenerationViews:
        configs, form = self.configs, self.form
        where, dtype = self.where, self.tables.dtype

        def view_of(generation: FloatGeneration, keys: Sequence[str]) -> TablesView:
            lookups = _lookups_of(configs, form, keys)
            order = [lookup.key for lookup in lookups]
            known = (where, generation, list(keys), lookups, order, dtype)
            tables = generation.registered
            if under_way is None or tables is None:
                placed = generation.placed(lookups)
                features = _native.ShardedFeatures(placed, generation.window)
                return HostView(*known, placed, features, rows_read)
            strips = strips_of(generation, lookups, form.pooled)
            reader = GpuReader(under_way.gpu, tables, strips, 32)
            return GpuView(*known, under_way, reader, tables)

        return GenerationViews(generation, view_of)

    def _next_view(self, generation: Generation) -> GenerationViews:
        assert isinstance(generation, FloatGeneration)
        if isinstance(self._view, DrainedView):
            return self._views_of(generation, self.rows_read, self.under_way)
        return self._view.next(generation)

    def _shown(self, view: GenerationViews) -> _native.TableWindow:
        assert self.rank is not None
        return self.tables.own_pages(view.generation.parts[self.rank])


def _lookups_of(
    configs: Sequence[Any], form: OutputForm, keys: Sequence[str]
) -> list[FeatureLookup]:
    """Returns the lookups of a batch with `keys`, in the order of the output."""
    looked_up = {
        name: (table, feature)
        for table, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for name, feature in zip(names, table.feature_names, strict=True)
    }
    places = {key: place for place, key in reversed(list(enumerate(keys)))}
    kernel_means = set(form.kernel_means)
    column = 0
    lookups = []
    for name in form.names:
        table, feature = looked_up[name]
        means = table.name in kernel_means
        lookups.append(FeatureLookup(places[feature], table.name, column, means))
        column += table.embedding_dim
    return lookups
