"""Calls of the model that is served, with several requests at once."""

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec import KeyedJaggedTensor

from torchrec_bls.direct.serving.reading_modules import reading_modules
from torchrec_bls.serve.batches import dense_of, ids_of, outputs_of
from torchrec_bls.serve.inputs import Features, ModelInputs

#: Samples, ids and seconds of batches of several sizes, see `measured`.
Measured = Sequence[tuple[int, int, float]]
#: Factor by which a change has to make batches faster, so that it is kept.
ENOUGH = 1.05
# Sizes of the batches that predictions are fitted to: samples, and ids of each feature.
_SAMPLES, _IDS = (1, 8, 32, 128), (1, 4)
_WARMING, _MEASURED = 2, 5


class ModelCalls:
    """Calls a model with requests.

    Args:
        model: the model, which reads its tables. Of its modules that do so, those without weights
            get none any more, if others have them.
        keys: names of its features.
        dense_columns: number of its dense features. None: that is found by calls of the model, as
            the size of the linear layer that takes them, alone or beside all embeddings.

    Attributes:
        dense_columns: number of its dense features; 0 if it takes none.
        seconds: seconds that the model has taken, in all calls.
        model: see above.

    Raises:
        ValueError: its forward takes something else than a KeyedJaggedTensor, or dense features and
            one; or the number of dense features can't be found.
    """

    def __init__(self, model: nn.Module, keys: Sequence[str], dense_columns: int | None) -> None:
        self.model: Any = model
        self._keys = list(keys)
        self.dense_columns = 0
        self.seconds = 0.0
        readers = reading_modules(model).values()
        self._is_weighted = any(each.input_check.is_weighted for each in readers)
        for each in readers:
            if self._is_weighted and not each.input_check.is_weighted:
                # It would use the weights, as TorchRec's sharded modules do. Others pass them over.
                module = cast("nn.Module", each)
                module.register_forward_pre_hook(_without_weights, with_kwargs=True)
        if _takes_dense(model):
            self.dense_columns = dense_columns or self._found_columns(model)

    def answered(self, requests: Sequence[Features]) -> dict[str, NDArray[np.float32]]:
        """Returns the outputs of a batch by name, float32 [samples, ...].

        Args:
            requests: features of each request in it.

        Raises:
            ValueError: the model returned something else than tensors with a row for each sample.
            Exception: what the model has raised.
        """
        with torch.no_grad():
            ids = ids_of(requests, self._keys)
            arguments = (ids,) if requests[0].dense is None else (dense_of(requests), ids)
            began = time.perf_counter()
            returned = self.model(*arguments)
            self.seconds += time.perf_counter() - began
        return outputs_of(returned, sum(each.samples for each in requests))

    def _found_columns(self, model: nn.Module) -> int:
        found = [getattr(each, "in_features", None) for each in model.modules()]
        of_layers: list[int] = list(dict.fromkeys(each for each in found if isinstance(each, int)))
        pooled = sum(
            table.embedding_dim * len(table.feature_names)
            for reader in reading_modules(model).values()
            if reader.direct_reads is not None
            for table in reader.direct_reads.configs
        )
        sizes = [*of_layers, *(each - pooled for each in of_layers if each > pooled)]
        rows = np.ones(len(self._keys), dtype=np.int64)
        cause: Exception | None = None
        for columns in sizes:
            try:
                # A module takes ids with weights in all batches, or in none.
                self.answered([made_up(1, 0, rows, columns, self._is_weighted)])
            except Exception as error:
                cause = error
            else:
                return int(columns)
        raise ValueError(
            f"the number of dense features is none of {sizes}, which the model's layers suggest: "
            "give it as dense_features (--dense-features)"
        ) from cause


def made_up(
    samples: int,
    ids: int,
    rows: NDArray[np.int64],
    dense_columns: int,
    is_weighted: bool,
    seed: int = 0,
) -> Features:
    """Returns features that are made up.

    Args:
        samples: number of samples.
        ids: ids of each feature in each sample.
        rows: number of rows of each feature.
        dense_columns: number of dense features, or 0.
        is_weighted: whether ids have weights.
        seed: seed of all numbers.
    """
    generator = np.random.default_rng(seed)
    counts = np.full(len(rows), samples * ids, dtype=np.int64)
    shares = generator.random(int(counts.sum()))
    values = (shares * np.repeat(rows, counts)).astype(np.int64)
    return Features(
        samples,
        generator.random((samples, dense_columns), dtype=np.float32) if dense_columns else None,
        values,
        np.full(samples * len(rows), ids, dtype=np.int32),
        np.ones(len(values), dtype=np.float32) if is_weighted else None,
        counts,
        (False,) * len(rows),
    )


def measured(calls: ModelCalls, inputs: ModelInputs) -> Iterator[tuple[int, int, float]]:
    """Calls the model with batches of several sizes, and yields the samples, ids and seconds of
    each."""
    rows = np.array([each.rows for each in inputs.features])
    for samples in _SAMPLES:
        for ids in _IDS:
            if samples > inputs.max_samples:
                continue
            seconds = []
            for number in range(_WARMING + _MEASURED):
                # Other ids each time, so that their rows are in no cache.
                batch = made_up(
                    samples, ids, rows, inputs.dense_columns, inputs.is_weighted, seed=number
                )
                began = time.perf_counter()
                calls.answered([batch])
                if number >= _WARMING:
                    seconds.append(time.perf_counter() - began)
            yield samples, batch.ids, float(np.median(seconds))


def times_as_fast(before: Measured, after: Measured) -> float:
    """Returns by which factor batches are faster, the geometric mean of all sizes."""
    ratios = [a / b for (*_, a), (*_, b) in zip(before, after, strict=True)]
    return float(np.exp(np.mean(np.log(ratios))))


def _without_weights(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes the weights out of what a module is called with."""

    def without(given: Any) -> Any:
        if not isinstance(given, KeyedJaggedTensor):
            return given
        varies = given.variable_stride_per_key()
        return KeyedJaggedTensor(
            given.keys(),
            given.values(),
            lengths=given.lengths(),
            stride=None if varies else given.stride(),
            stride_per_key_per_rank=given.stride_per_key_per_rank() if varies else None,
            inverse_indices=given.inverse_indices_or_none(),
        )

    return tuple(map(without, args)), {name: without(each) for name, each in kwargs.items()}


def _takes_dense(model: nn.Module) -> bool:
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [
        each
        for each in inspect.signature(model.forward).parameters.values()
        if each.default is inspect.Parameter.empty and each.kind in positional
    ]
    if len(needed) not in (1, 2):
        raise ValueError(
            f"forward of {type(model).__name__} takes {len(needed)} arguments, but a service calls "
            "it with a KeyedJaggedTensor, or with dense features and a KeyedJaggedTensor: wrap it "
            "into a module whose forward takes these"
        )
    return len(needed) == 2
