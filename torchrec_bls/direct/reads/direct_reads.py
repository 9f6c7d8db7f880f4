"""A module's own lookups in the tables of all ranks, in place of its exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torchrec.distributed.types import LazyAwaitable, ParameterSharding, ShardMetadata
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, Generation
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.shared_tables import OwnTables, SharedTables, share_tables
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables


class UnsentBatch(ExchangeAwaitable[Any]):
    """The two waits of an input dist that sends nothing: the batch stays where it is.

    Args:
        batch: the batch.
        context: TorchRec's context of the batch, in which it stays as `bls_unsent`. TorchRec's
            feature processors make other features of it, and hand on these alone.
    """

    def __init__(self, batch: CheckedBatch, context: Any) -> None:
        super().__init__()
        self.batch = batch
        context.bls_unsent = batch

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        """Returns the features, of all shardings in one, for TorchRec's feature processors. They
        cannot do a batch without samples, which has nothing to process."""
        if self.batch.features.stride() > 0:
            yield self.batch.features

    def _wait_impl(self) -> "UnsentBatch":
        return self


class DirectEmbeddings(ExchangeAwaitable[Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """Embeddings that need no waiting.

    Attributes:
        generation: generation of the weights that they come from.
    """

    def __init__(self, embeddings: Any, generation: int) -> None:
        super().__init__()
        self._embeddings = embeddings
        self.generation = generation

    def _wait_impl(self) -> Any:
        return self._embeddings


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
    def read(self, reads: "DirectReads", batch: CheckedBatch) -> Any:
        """Returns the embeddings of a batch. `reads` must know the batch's keys already."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns a description. Another process that knows the tables makes the same form from
        it."""


class DirectReads:
    """The tables of one generation that a module reads, in the order of its output.

    Args:
        where: name of the module and its rank, for messages.
        tables: tables in shared memory.
        generation: generation that is read.
        live: weights of this rank; None where a process has shared no tables itself.
        rank: rank whose tables this process publishes; None where it only reads.
        configs: EmbeddingConfig or EmbeddingBagConfig of each table.
        form: form of the output.

    Attributes:
        where: see above.
        tables: see above.
        generation: see above.
        live: see above.
        rank: see above.
        configs: see above.
        form: see above.
        dtype: dtype of the weights.
        order: places of the output's features among the keys of the last batch.
        rows_read: rows read of each rank's shards, in all batches, int64 [ranks].
    """

    def __init__(
        self,
        where: str,
        tables: SharedTables,
        generation: Generation,
        live: LiveWeights | None,
        rank: int | None,
        configs: Sequence[Any],
        form: OutputForm,
    ) -> None:
        self.where = where
        self.tables = tables
        self.generation = generation
        self.live = live
        self.rank = rank
        self.configs = list(configs)
        self.form = form
        self.dtype = tables.dtype
        self.order: list[int] = []
        self.rows_read = torch.zeros(tables.owners, dtype=torch.int64)
        self._keys: list[str] | None = None
        self._lookups: list[FeatureLookup] = []
        self._features = generation.features([])

    def output(self, batch: CheckedBatch) -> Any:
        """Returns the embeddings of a batch.

        Raises:
            ValueError: see `check_weights`. Or the form is impossible for such a batch.
        """
        self.check_weights()
        keys = batch.features.keys()
        if keys != self._keys:
            self._lookups = self._lookups_of(keys)
            self._features = self.generation.features(self._lookups)
            self._keys = list(keys)
            self.order = [lookup.key for lookup in self._lookups]
        return self.form.read(self, batch)

    def _lookups_of(self, keys: Sequence[str]) -> list[FeatureLookup]:
        """Returns the lookups in the order of the output."""
        names_by_table = get_embedding_names_by_table(self.configs)
        looked_up = {
            name: (table, feature)
            for table, names in zip(self.configs, names_by_table, strict=True)
            for name, feature in zip(names, table.feature_names, strict=True)
        }
        column = 0
        lookups = []
        for name in self.form.names:
            table, feature = looked_up[name]
            means = table.name in self.form.kernel_means
            lookups.append(FeatureLookup(keys.index(feature), table.name, column, means))
            column += table.embedding_dim
        return lookups

    def prepare(self, generation: Generation) -> Callable[[], None]:
        """Returns a function that makes this module read `generation`, and its weights show it.

        All steps that may fail are done before it returns, since several modules change together.

        Raises:
            ValueError: see `check_weights`; writes to the weights would be lost.
            BLSError: the generation cannot be mapped once more.
        """
        self.check_weights()
        features = generation.features(self._lookups)
        live = self.live
        pages = None
        if live is not None and self.rank is not None:
            pages = _native.PrivatePages(generation.segments[self.rank])

        def take() -> None:
            self.generation, self._features = generation, features
            if live is not None and pages is not None:
                live.move_to(pages)

        return take

    def copy_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the rows of all ids to `out`, feature by feature, [ids, dim]."""
        values = batch.features.values()
        _native.copy_rows_directly(
            self._features,
            (values.data_ptr(), values.element_size()),
            values.numel(),
            batch.counts,
            (self.rows_read.data_ptr(), self.rows_read.numel()),
            out.shape[1] * out.element_size(),
            out.data_ptr(),
        )

    def sum_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the pooled rows of all bags to `out`, [samples, columns]."""
        features = batch.features
        lengths, values, weights = features.lengths(), features.values(), features.weights_or_none()
        _native.sum_rows_directly(
            self._features,
            (lengths.data_ptr(), lengths.element_size()),
            (values.data_ptr(), values.element_size()),
            (0, 0) if weights is None else (weights.data_ptr(), weights.element_size()),
            features.stride(),
            values.numel(),
            batch.counts,
            (self.rows_read.data_ptr(), self.rows_read.numel()),
            out.shape[1] * out.element_size(),
            out.data_ptr(),
        )

    def check_weights(self) -> None:
        """Raises ValueError if the weights were written to since they were published."""
        if self.live is not None and self.live.written:
            raise ValueError(
                f"{self.where}: its weights were written to after its tables became generation "
                f"{self.generation.number}, which lookups go on reading. Publish them, or shard "
                'with lookup="exchange" to train'
            )


def layouts_of(tables: Iterable[Any], params: Mapping[str, ParameterSharding]) -> list[TableLayout]:
    """Returns the rows and columns of each rank, for each table.

    Args:
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
        params: the module's plan; no table is data-parallel.
    """
    return [
        TableLayout(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            table.data_type.name,
            tuple(_shard_of(shard) for shard in _shards_of(params[table.name])),
        )
        for table in tables
    ]


def share(
    exchanges: Any,
    layouts: Sequence[TableLayout],
    lookup_tables: Sequence[LookupTables],
    module: Any,
    dtype: torch.dtype,
) -> tuple[LiveWeights, SharedTables, Generation]:
    """Puts the tables of a module into shared memory, collectively.

    Args:
        exchanges: ModuleExchanges of the module.
        layouts: layouts of its tables.
        lookup_tables: tables of its lookups.
        module: TorchRec's sharded module.
        dtype: dtype of the weights.

    Raises:
        RendezvousError: see share_tables.
    """
    live = LiveWeights(
        [storage for tables in lookup_tables for storage in tables.storages()],
        _tensors_of(module),
    )
    shards = {
        (name, _shard_of(metadata)): weights
        for tables in lookup_tables
        for name, metadata, weights in tables.shards()
    }
    tables, generation = share_tables(
        exchanges.group,
        exchanges.name,
        exchanges.deadline.seconds,
        layouts,
        OwnTables(live, shards),
        dtype,
        exchanges.config.huge_pages,
        exchanges.session,
    )
    return live, tables, generation


def _shards_of(planned: ParameterSharding) -> list[ShardMetadata]:
    shards: list[ShardMetadata] = planned.sharding_spec.shards
    return shards


def _shard_of(metadata: ShardMetadata) -> Shard:
    rows, columns = metadata.shard_sizes
    first_row, first_column = metadata.shard_offsets
    return Shard(metadata.placement.rank(), first_row, rows, first_column, columns)


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor through which the weights of a sharded module may be reached."""
    for parameter in module.parameters():
        yield parameter
        # Covers all tables of a kernel; a parameter shows one table. TorchRec copies modules by it.
        whole = getattr(parameter, "_original_tensor", None)
        if whole is not None:
            yield whole
    for lookup in module._lookups:
        yield from lookup.parameters()
        for kernel in lookup._emb_modules:
            for parameter in kernel.fused_optimizer.params.values():
                yield from _local(parameter)
    for tensor in module.state_dict().values():
        yield from _local(tensor)


def _local(tensor: Any) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            yield shard.tensor
    else:
        yield tensor
