"""Lookups of a quantized module in the rows of all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_bls import _native
from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import GpuReader
from torchrec_bls.direct.layout import TableLayout
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.new_weights import prefix_of
from torchrec_bls.direct.reads.direct_lookup import DirectLookup
from torchrec_bls.direct.reads.direct_reads import DirectEmbeddings, DirectReads, registered_in
from torchrec_bls.direct.sharing import abandon_with
from torchrec_bls.direct.steps import Content, content_in_memory
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.kept_features import kept
from torchrec_bls.distributed.inputs.variable_batch import features_of_names, spread
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.quant.batches import NO_GRADIENTS, looked_up, needs_ids
from torchrec_bls.quant.gpu_lookups import GpuBatches, GpuLookup, readers_of
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.shared_rows import RowsGeneration, SharedRows, share_rows
from torchrec_bls.quant.stored_tables import RowSource


@dataclass(frozen=True)
class BoundModule:
    """What lookups read of one generation; see View.

    Attributes:
        generation: generation that is read.
        module: TorchRec's module, whose weights are the window of the generation. On a GPU its
            lookups are GpuLookups.
    """

    generation: RowsGeneration
    module: Any


class StoredReads(DirectReads[BoundModule]):
    """Looks batches up with TorchRec's own module, whose weights are the rows of all ranks.

    Args:
        where: see DirectReads.
        tables: tables in shared memory.
        generation: generation that is read.
        live: see DirectReads. They show the window that is read.
        rank: see DirectReads.
        configs: see DirectReads.
        module: TorchRec's quantized module. Of each generation it gets a copy without its rows.
        lookups: lookups of `module`.
        input_check: input check of the module.

    Attributes:
        tables: see above.
    """

    tables: SharedRows
    _other_cure: ClassVar[str] = ""

    def __init__(
        self,
        where: str,
        tables: SharedRows,
        generation: RowsGeneration,
        live: LiveWeights | None,
        rank: int | None,
        configs: Sequence[Any],
        module: Any,
        lookups: Lookups,
        input_check: InputCheck,
    ) -> None:
        super().__init__(where, tables, live, rank, configs)
        self._module = module
        self._lookups = lookups
        self._input_check = input_check
        self._is_sequence = not self.pooled
        self._features = features_of_names(configs)
        # Reads of each lookup by a GPU, in all generations.
        self._readers: list[list[GpuReader]] = []
        self._batches = (
            None
            if tables.gpu is None
            else GpuBatches(module, lookups.made, lookups.configs, lookups.by_lookup, tables.gpu)
        )
        self._view = self._bound_to(generation)

    @property
    def pooled(self) -> bool:
        """See DirectReads."""
        return not hasattr(self._module, "need_indices")

    def output(self, batch: CheckedBatch) -> DirectEmbeddings:
        """See DirectReads."""
        self.check_serves()
        view = self._view
        if batch.is_on_gpu:
            return self._output_of_gpu(batch)
        if self._is_sequence:
            # The output has its lengths, and may have its ids.
            features = kept(batch.in_full(self._features.values()).features)
        else:
            features = batch.features
        pin = self.pinned(view.generation)
        try:
            embeddings = looked_up(view.module, features, self._input_check)
        finally:
            self.keep_until_read(pin)
            del pin  # an exception that somebody keeps would keep it
        gpu = self.tables.gpu
        if gpu is not None and self._is_sequence:
            embeddings = _on_gpu(gpu, embeddings)
        if batch.varying is not None and not self._is_sequence:
            names, indices = batch.varying.inverse_indices()
            inverse = names, indices if gpu is None else gpu.copy_of(indices)
            embeddings = spread(embeddings, inverse, self._features)
        return DirectEmbeddings(embeddings, view.generation.version)

    def _output_of_gpu(self, batch: CheckedBatch) -> DirectEmbeddings:
        view, under_way = self._view, self.under_way
        tables = registered_in(view)
        version = view.generation.version
        assert under_way is not None and self._batches is not None
        if self._is_sequence:
            batch = batch.counted()
        pin = self.pinned(view.generation)
        number = under_way.next_batch()
        try:
            read = self._batches.sequences if self._is_sequence else self._batches.pooled
            embeddings, launches = read(batch, tables)
            features = batch.features
            under_way.check_later(
                launches, number, version, features.keys(), features.values().numel()
            )
        finally:
            self.keep_until_read(pin)
            del pin  # an exception that somebody keeps would keep it
        return DirectEmbeddings(embeddings, version)

    def live_content(self) -> Content:
        """See DirectReads."""
        assert self.live is not None
        [(memory, _)] = self.live.storages()
        return content_in_memory(
            [
                (memory[share.begin : share.end], share.offset)
                for share in self.tables.rows.shares
                if share.owner == self.rank
            ]
        )

    def shown_by(self, module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See DirectReads. Quantized weights are buffers."""
        tables = prefix_of(name, self.pooled)[:-1]
        of_tables = module.get_submodule(tables.rpartition(".")[2])
        for each, buffer in of_tables.named_buffers(tables):
            yield each, getattr(buffer, "elem", buffer)

    def as_json(self) -> dict[str, Any]:
        """See DirectReads."""
        return output_of(self._module)

    def aside(self, generation: Generation, check: InputCheck) -> "StoredReads":
        """See DirectReads."""
        assert isinstance(generation, RowsGeneration)
        made: StoredReads = self._aside(
            self._bound_to(generation), torch.zeros_like(self.rows_read), self._none_under_way()
        )
        made._input_check = check
        return made

    def _next_view(self, generation: Generation) -> BoundModule:
        assert isinstance(generation, RowsGeneration)
        read = self.generation
        if (generation.serial, generation.version) == (read.serial, read.version):
            generation = generation.mapped_anew()  # this process may have written to it
        return self._bound_to(generation)

    def _bound_to(self, generation: RowsGeneration) -> BoundModule:
        gpu, registered = self.tables.gpu, generation.registered
        if gpu is None or registered is None:
            memory = torch.frombuffer(generation.window, dtype=torch.uint8)
            return BoundModule(generation, self._lookups.bound_to(memory))
        if not self._readers:
            self._readers = [
                readers_of(lookup, tables, gpu, registered)
                for lookup, tables in zip(self._lookups.made, self._lookups.by_lookup, strict=True)
            ]
        lookups = [
            GpuLookup(lookup, gpu, readers, registered)
            for lookup, readers in zip(self._lookups.made, self._readers, strict=True)
        ]
        return BoundModule(generation, self._lookups.done_by(lookups))

    def _shown(self, view: BoundModule) -> _native.TableWindow:
        return view.generation.window


def _on_gpu(gpu: Gpu, embeddings: Mapping[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Returns sequences with lengths and ids on the GPU, where their rows are."""
    made = {}
    for name, jagged in embeddings.items():
        ids = jagged.weights_or_none()
        made[name] = JaggedTensor(
            values=jagged.values(),
            lengths=gpu.copy_of(jagged.lengths()),
            weights=None if ids is None else gpu.copy_of(ids),
        )
    return made


def output_of(module: Any) -> dict[str, Any]:
    """Returns what two quantized modules have to share beside their tables, for the same output."""
    return {
        "output": str(module.output_dtype()),
        "row_alignment": int(module.row_alignment),
        "with_ids": needs_ids(module),
    }


def direct_lookup(
    state: ModuleState,
    module: Any,
    lookups: Lookups,
    layouts: Sequence[TableLayout],
    source: RowSource,
) -> DirectLookup:
    """Puts a module's rows where all ranks of the host read them, collectively.

    Args:
        state: state of the sharded module.
        module: TorchRec's quantized module, whose own weights are freed.
        lookups: lookups of the module.
        layouts: shards of the tables, in whole rows.
        source: source of the rows.

    Raises:
        ValueError: the checkpoint lacks rows of this rank; the other ranks raise RendezvousError.
        RendezvousError: a rank did not come, has no memory for its shards, or has other weights.
    """
    exchanges, check = state.exchanges, state.input_check
    group, config = exchanges.group, exchanges.config
    tables, generation = share_rows(
        group,
        exchanges.name,
        timeout_of(group) if config.deadline is None else config.deadline,
        lookups.tables,
        layouts,
        source,
        lookups.huge_pages,
        state.gpu,
    )
    memory = torch.frombuffer(generation.window, dtype=torch.uint8)
    shown = lookups.move_to(memory)
    wrappers = [each for each in shown if hasattr(each, "elem")]
    plain = [getattr(each, "elem", each) for each in shown]
    live = LiveWeights([memory], plain, wrappers)
    abandon_with(live, tables.page, group.rank())
    configs = list(state.tables)
    reads = StoredReads(
        state.where, tables, generation, live, group.rank(), configs, module, lookups, check
    )
    return DirectLookup(reads, check, f"{state.where}: {NO_GRADIENTS}")
