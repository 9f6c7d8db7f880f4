"""A module's own lookups in the tables of all ranks, in place of its exchanges."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable, ParameterSharding, ShardMetadata

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, Generation
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.shared_tables import OwnTables, share_tables
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables


class UnsentBatch(ExchangeAwaitable[Any]):
    """Stands for both waits of an input dist: the batch stays where it is."""

    def __init__(self, batch: CheckedBatch) -> None:
        super().__init__()
        self.batch = batch

    def _wait_impl(self) -> "UnsentBatch":
        return self


class DirectEmbeddings(ExchangeAwaitable[Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """Embeddings that are there already."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self._embeddings = embeddings

    def _wait_impl(self) -> Any:
        return self._embeddings


class DirectReads:
    """What a module reads: the tables of one generation, in the order of its output.

    Args:
        where: name of the module and its rank, for messages.
        generation: that is read.
        live: this rank's weights.
        dtype: of the weights.

    Attributes:
        generation: see above.
        dtype: see above.
        keys: of the batches that `bind` was last called for; None before.
        names: of the embeddings, in the order of the output.
        order: places of their features among `keys`.
    """

    def __init__(
        self,
        where: str,
        generation: Generation,
        live: LiveWeights,
        dtype: torch.dtype,
    ) -> None:
        self._where = where
        self.generation = generation
        self.dtype = dtype
        self.keys: list[str] | None = None
        self.names: list[str] = []
        self.order: list[int] = []
        self._live = live
        self._features = generation.features([])

    def bind(self, keys: Sequence[str], lookups: Mapping[str, FeatureLookup]) -> None:
        """Says what is looked up for batches with `keys`, by name in the order of the output."""
        self._features = self.generation.features(list(lookups.values()))
        self.keys, self.names = list(keys), list(lookups)
        self.order = [lookup.key for lookup in lookups.values()]

    def copy_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the rows of all ids to `out`, feature by feature, [ids, dim]."""
        values = batch.features.values()
        _native.copy_rows_directly(
            self._features,
            (values.data_ptr(), values.element_size()),
            values.numel(),
            batch.counts,
            out.shape[1] * out.element_size(),
            out.data_ptr(),
        )

    def sum_rows(self, batch: CheckedBatch, out: torch.Tensor) -> None:
        """Writes the pooled rows of all bags to `out`, [samples, columns]."""
        features = batch.features
        lengths, values, weights = features.lengths(), features.values(), features.weights_or_none()
        if weights is not None and weights.dtype != torch.float32:
            weights = weights.float()
        _native.sum_rows_directly(
            self._features,
            (lengths.data_ptr(), lengths.element_size()),
            (values.data_ptr(), values.element_size()),
            (0, 0) if weights is None else (weights.data_ptr(), weights.element_size()),
            features.stride(),
            values.numel(),
            batch.counts,
            out.shape[1] * out.element_size(),
            out.data_ptr(),
        )

    def check_weights(self) -> None:
        """Raises ValueError if the weights were written to since they were published."""
        if self._live.written:
            raise ValueError(
                f"{self._where}: its weights were written to after its tables became generation "
                f"{self.generation.number}, which lookups go on reading. Publish them, or shard "
                'with lookup="exchange" to train'
            )


def layouts_of(tables: Iterable[Any], params: Mapping[str, ParameterSharding]) -> list[TableLayout]:
    """Returns which rank has what of each table.

    Args:
        tables: EmbeddingConfig or EmbeddingBagConfig of each.
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
    item_bytes: int,
) -> tuple[LiveWeights, Generation]:
    """Puts the tables of a module into shared memory, collectively.

    Args:
        exchanges: ModuleExchanges of the module.
        layouts: of its tables.
        lookup_tables: of its lookups.
        module: TorchRec's sharded module.
        item_bytes: of a weight.

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
    generation = share_tables(
        exchanges.group,
        exchanges.name,
        exchanges.deadline.seconds,
        layouts,
        OwnTables(live, shards),
        item_bytes,
        exchanges.config.huge_pages,
    )
    return live, generation


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
        # All tables of a kernel, of which a parameter shows one; TorchRec copies modules by it.
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
