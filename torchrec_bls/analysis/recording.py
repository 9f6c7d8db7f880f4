"""Records the lookups of a model's embedding modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tqdm import tqdm

from torchrec_bls.analysis.samples import Lookup, SampledTable, SampleWriter

_POOLED = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_COLLECTIONS = (*_POOLED, EmbeddingCollection, ShardedEmbeddingCollection)


def record_lookups(model: nn.Module, batches: Iterable[Any], path: str | Path | None) -> None:
    """Runs a model on some batches and writes what it looks up to a folder, for
    `torchrec-bls analyse-tables`.

    Every EmbeddingBagCollection and EmbeddingCollection is recorded, plain or sharded by TorchRec
    or by this package. The model runs without gradients and in evaluation mode; its former mode
    returns afterwards. A sharded model runs on all ranks, with as many batches on each. Rows are
    recorded as they arrive: if the model has codecs, the rows are already rounded.

    Args:
        model: a trained model: rows of a new one say nothing. Each batch is its one argument.
        batches: a few batches, of the size and from the data of the training.
        path: folder for the samples of this rank, new or empty. None: this rank takes part
            and records nothing.

    Raises:
        FileExistsError: something is in the folder.
        ValueError: there are no batches or no collections, or a lookup cannot be recorded: the size
            of a batch varies by key, or two tables have one name.
    """
    recorders = [
        _Recorder(name or type(module).__name__, module)
        for name, module in model.named_modules()
        if isinstance(module, _COLLECTIONS)
    ]
    _check_tables(model, recorders)
    names = [table.name for recorder in recorders for table in recorder.configs]
    writer = None if path is None else SampleWriter(Path(path), names)
    count = 0
    with torch.no_grad(), _evaluating(model), ExitStack() as hooks:
        for recorder in recorders:
            hooks.callback(recorder.listen().remove)
        for batch in tqdm(batches, desc="recording", unit="batch", disable=writer is None):
            model(batch)
            lookups: dict[str, list[Lookup]] = {}
            for recorder in recorders:
                lookups |= recorder.take()
            if writer is not None:
                writer.add(lookups)
            count += 1
    if count == 0:
        raise ValueError("there are no batches to record: give some, of the training's data")
    _warn_of_silence(recorders)
    if writer is not None:
        writer.finish([table for recorder in recorders for table in recorder.tables()])


class _Recorder:
    """Records the inputs and outputs of one collection of a model.

    Args:
        name: name of the collection, for messages.
        collection: a collection of one of the kinds above.
    """

    def __init__(self, name: str, collection: Any) -> None:
        self.name = name
        self._collection = collection
        self._pooled = isinstance(collection, _POOLED)
        if isinstance(collection, _SHARDED):
            self.configs = list(collection._table_name_to_config.values())
        elif self._pooled:
            self.configs = list(collection.embedding_bag_configs())
        else:
            self.configs = list(collection.embedding_configs())
        self._names = get_embedding_names_by_table(self.configs)
        self.calls = 0
        self._weighted = False
        self._under_way: LazyAwaitable[Any] | None = None
        self._lookups: dict[str, list[Lookup]] | None = None

    def listen(self) -> Any:
        """Starts; returns the handle of a hook."""
        return self._collection.register_forward_hook(self._hear, with_kwargs=True)

    def take(self) -> dict[str, list[Lookup]]:
        """Returns the lookups since the last call, by table and in the order of features."""
        if self._under_way is not None and self._lookups is None:
            self._under_way.wait()  # the model did not wait
        lookups, self._lookups, self._under_way = self._lookups, None, None
        if lookups is not None:
            return lookups
        return {
            table.name: [Lookup.nothing(table.embedding_dim) for _ in table.feature_names]
            for table in self.configs
        }

    def tables(self) -> list[SampledTable]:
        """Returns the collection's tables."""
        return [
            SampledTable(
                name=table.name,
                rows=table.num_embeddings,
                dim=table.embedding_dim,
                pooled=self._pooled,
                weighted=self._weighted,
                data_type=table.data_type.name,
                features=tuple(table.feature_names),
            )
            for table in self.configs
        ]

    def _hear(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._under_way is not None or self._lookups is not None:
            raise ValueError(
                f"'{self.name}' was called twice for one batch: record a model that calls each "
                "collection once"
            )
        self.calls += 1
        ids = self._checked(args[0] if args else kwargs.get("features"))
        if isinstance(output, LazyAwaitable):
            # The model waits for it, and may do so only once.
            self._under_way = output
            output.callbacks.append(partial(self._keep, ids))
        else:
            self._keep(ids, output)

    def _checked(self, features: object) -> KeyedJaggedTensor:
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(
                f"'{self.name}' was called with a {type(features).__name__}, not a "
                "KeyedJaggedTensor: record the model as it is trained"
            )
        if features.variable_stride_per_key():
            raise ValueError(
                f"'{self.name}' was called with a batch whose size varies by key, which is not "
                "recorded: give each sample its ids instead of inverse_indices"
            )
        return features

    def _keep(self, features: KeyedJaggedTensor, output: Any) -> Any:
        """Stores ids and rows of all features. Returns the output, as callbacks must."""
        ids = _by_key(features)
        # Bags of a sharded collection are weighted if their ids have weights, whatever its own flag
        # says.
        self._weighted |= self._pooled and features.weights_or_none() is not None
        rows = output.to_dict() if self._pooled else output
        self._lookups = {
            table.name: [
                Lookup(*ids[feature], _as_float32(rows[name], table.embedding_dim))
                for feature, name in zip(table.feature_names, names, strict=True)
            ]
            for table, names in zip(self.configs, self._names, strict=True)
        }
        return output


def _by_key(features: KeyedJaggedTensor) -> dict[str, tuple[Any, Any]]:
    """Returns ids and lengths of each key."""
    keys = features.keys()
    lengths = features.lengths().to("cpu", torch.int64).view(len(keys), features.stride())
    ids = features.values().to("cpu", torch.int64).split(lengths.sum(1).tolist())
    return {
        key: (of_key.numpy(), length.numpy())
        for key, of_key, length in zip(keys, ids, lengths, strict=True)
    }


def _as_float32(embeddings: torch.Tensor | JaggedTensor, dim: int) -> Any:
    rows: torch.Tensor = embeddings if isinstance(embeddings, torch.Tensor) else embeddings.values()
    return rows.detach().to("cpu", torch.float32).reshape(-1, dim).numpy()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Keeps the model in evaluation mode, so that no layer counts or learns."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_tables(model: nn.Module, recorders: list[_Recorder]) -> None:
    if not recorders:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection to "
            "record: give the model that has them, not what wraps its output"
        )
    names = [table.name for recorder in recorders for table in recorder.configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{twice} are names of several tables, but bounds are given by name: name each table "
            "of the model differently"
        )


def _warn_of_silence(recorders: list[_Recorder]) -> None:
    silent = [recorder.name for recorder in recorders if recorder.calls == 0]
    if len(silent) == len(recorders):
        raise ValueError(
            f"{silent} were called for no batch: record a model that calls its collections, and "
            "not a pipeline's stages"
        )
    if silent:
        warnings.warn(
            f"{silent} were called for no batch, so that their tables have no samples",
            stacklevel=3,
        )
