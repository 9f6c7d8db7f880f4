"""Batches of several requests: their features as one, and its outputs as theirs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from torchrec_bls.serve.inputs import Features
from torchrec_bls.serve.waiting import Part

#: Name of the output of a model that returns one tensor.
SCORES = "scores"


def features_of(part: Part) -> Features:
    """Returns the features of some samples of a request."""
    whole, (_, first, end) = part.request.features, part
    if (first, end) == (0, whole.samples):
        return whole
    values, lengths, weights, counts = [], [], [], []
    id_at = length_at = 0
    for count, is_broadcast in zip(whole.counts.tolist(), whole.broadcast, strict=True):
        rows = 1 if is_broadcast else whole.samples
        of_samples = whole.lengths[length_at : length_at + rows]
        if is_broadcast:
            skipped, taken = 0, count
        else:
            skipped = int(of_samples[:first].sum())
            of_samples = of_samples[first:end]
            taken = int(of_samples.sum())
        span = slice(id_at + skipped, id_at + skipped + taken)
        values.append(whole.values[span])
        lengths.append(of_samples)
        if whole.weights is not None:
            weights.append(whole.weights[span])
        counts.append(taken)
        id_at, length_at = id_at + count, length_at + rows
    dense = whole.dense
    if dense is not None and len(dense) == whole.samples:
        dense = dense[first:end]
    return Features(
        end - first,
        dense,
        np.concatenate(values),
        np.concatenate(lengths),
        np.concatenate(weights) if weights else None,
        np.array(counts, dtype=np.int64),
        whole.broadcast,
    )


def dense_of(requests: Sequence[Features]) -> torch.Tensor:
    """Returns the dense features of a batch, float32 [samples, columns]."""
    blocks = []
    for each in requests:
        assert each.dense is not None
        is_one = len(each.dense) == 1 and each.samples != 1
        blocks.append(np.repeat(each.dense, each.samples, axis=0) if is_one else each.dense)
    return torch.from_numpy(np.concatenate(blocks))


def ids_of(requests: Sequence[Features], keys: list[str]) -> KeyedJaggedTensor:
    """Returns the ids of a batch.

    A feature with one sample that stands for all of its request has that once, and is looked up
    once: the batch has a size per key then, and inverse indices.

    Args:
        requests: features of each request.
        keys: names of the features.
    """
    values, weights = _by_key(requests, len(keys))
    if not any(any(each.broadcast) for each in requests):
        of_keys = [each.lengths.reshape(len(keys), -1) for each in requests]
        lengths = torch.from_numpy(np.concatenate(of_keys, axis=1).reshape(-1))
        samples = sum(each.samples for each in requests)
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=samples)
    rows = np.array([_rows(each) for each in requests])
    ends = rows.cumsum(axis=1)
    lengths = torch.from_numpy(
        np.concatenate(
            [
                each.lengths[ends[number, key] - rows[number, key] : ends[number, key]]
                for key in range(len(keys))
                for number, each in enumerate(requests)
            ]
        )
    )
    return KeyedJaggedTensor(
        keys,
        values,
        weights,
        lengths=lengths,
        stride_per_key_per_rank=[[count] for count in rows.sum(axis=0).tolist()],
        inverse_indices=(keys, torch.from_numpy(_inverse(requests, rows))),
    )


def _rows(features: Features) -> list[int]:
    return [1 if each else features.samples for each in features.broadcast]


def _by_key(requests: Sequence[Features], keys: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns all ids, and their weights if they have some, key after key, of all requests for each
    key. They are copies: a model may write to them, and a request be asked again."""
    values = [torch.from_numpy(each.values) for each in requests]
    weights = [torch.from_numpy(each.weights) for each in requests if each.weights is not None]
    if len(requests) == 1:
        return values[0].clone(), weights[0].clone() if weights else None
    counts = torch.from_numpy(np.concatenate([each.counts for each in requests]))
    _, by_key, weights_by_key = torch.ops.fbgemm.permute_1D_sparse_data(
        _key_after_key(len(requests), keys),
        counts,
        torch.cat(values),
        torch.cat(weights) if weights else None,
    )
    return by_key, weights_by_key


@lru_cache(64)
def _key_after_key(requests: int, keys: int) -> torch.Tensor:
    """Returns the places of what requests have for each key, one after the other, in a list that
    has the first request's first."""
    return torch.arange(requests * keys, dtype=torch.int32).reshape(requests, keys).T.flatten()


def _inverse(requests: Sequence[Features], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the row of each sample under each key, [keys, samples]."""
    begins = rows.cumsum(axis=0) - rows
    blocks = []
    for each, counts, begin in zip(requests, rows, begins, strict=True):
        steps = np.arange(each.samples)[None, :] * (counts != 1)[:, None]
        blocks.append(begin[:, None] + steps)
    return np.concatenate(blocks, axis=1)


def outputs_of(returned: Any, samples: int) -> dict[str, NDArray[np.float32]]:
    """Returns the outputs of a model by name, float32 [samples, ...]: `scores` of a model that
    returns a tensor. They are copies: a model may write to the same memory in its next forward.

    Raises:
        ValueError: it returned something else than tensors with a row for each sample.
    """
    if isinstance(returned, torch.Tensor):
        named: Mapping[str, Any] = {SCORES: returned}
    elif isinstance(returned, Mapping):
        named = returned
    elif isinstance(returned, (tuple, list)):
        named = {f"output_{number}": each for number, each in enumerate(returned)}
    else:
        named = {SCORES: returned}
    outputs = {}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (samples,):
            shape = list(getattr(tensor, "shape", []))
            raise ValueError(
                f"the model returned a {type(tensor).__name__} {shape} as '{name}' for {samples} "
                "samples: a service needs tensors with a row for each sample"
            )
        outputs[str(name)] = np.array(tensor.detach().to(torch.float32).numpy())
    return outputs
