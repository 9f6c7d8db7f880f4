"""What a model takes, and the requests that fit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_bls import _native
from torchrec_bls.direct.offers.collections import collections_of
from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.outcomes import Outcome, RequestError, bad

DENSE = "dense"
#: Prefix of the tensors of all features at once.
ALL = "ids"
#: Elements of each datatype that tensors may have.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
}
_VALUES, _LENGTHS, _WEIGHTS = "INT64", "INT32", "FP32"
# Size of a dimension at most, which lengths of 32 bits can count.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Feature:
    """A feature of a model.

    Attributes:
        name: its name.
        rows: rows of its smallest table; ids are below that.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class Features:
    """Checked contents of a request, by feature in the model's order.

    Attributes:
        samples: its samples.
        dense: float32 [samples or 1, columns], or None where the model takes none.
        values: its ids, int64 [ids], feature after feature.
        lengths: numbers of ids, int32, feature after feature: of each sample, or of the one that
            stands for all.
        weights: weights of the ids, float32 [ids], or None where the model takes none.
        counts: number of ids of each feature.
        broadcast: whether a feature has one sample that stands for all.
    """

    samples: int
    dense: NDArray[np.float32] | None
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    counts: NDArray[np.int64]
    broadcast: tuple[bool, ...]

    @property
    def ids(self) -> int:
        """Returns the number of its ids."""
        return self.values.size


class _Place(NamedTuple):
    """Where a request has the ids of a feature, or of all: numbers of its tensors.

    Attributes:
        values: of the ids.
        lengths: of their numbers; None: `fixed` of each sample.
        weights: of their weights, or None.
        fixed: ids of each sample.
        broadcast: whether one sample stands for all.
    """

    values: int
    lengths: int | None
    weights: int | None
    fixed: int
    broadcast: bool


class Layout(NamedTuple):
    """Where a request has what the model takes.

    Attributes:
        samples: its samples.
        ids: its ids.
        dense: number of the tensor of dense features, or None.
        places: of each feature; or one of all.
    """

    samples: int
    ids: int
    dense: int | None
    places: Sequence[_Place]


class ModelInputs:
    """What a model takes: its dense features, and the features of its tables.

    Args:
        features: its features, in the order of the KeyedJaggedTensor that it gets.
        dense_columns: number of its dense features; 0 if it takes none.
        is_weighted: whether a table takes weights.
        max_samples: samples that a request may have.

    Attributes:
        features: see above.
        dense_columns: see above.
        is_weighted: see above.
        max_samples: see above.
    """

    def __init__(
        self, features: Sequence[Feature], dense_columns: int, is_weighted: bool, max_samples: int
    ) -> None:
        self.features = tuple(features)
        self.dense_columns = dense_columns
        self.is_weighted = is_weighted
        self.max_samples = max_samples
        self._rows = [each.rows for each in features]

    def tensors(self) -> list[dict[str, Any]]:
        """Returns the tensors of a request with all features at once, and those of each feature,
        as the metadata of a model names them. A dimension of -1 has any size."""
        listed = []
        if self.dense_columns:
            listed.append(_metadata(DENSE, "FP32", [-1, self.dense_columns]))
        for prefix in (ALL, *(each.name for each in self.features)):
            listed.append(_metadata(f"{prefix}.values", _VALUES, [-1]))
            listed.append(_metadata(f"{prefix}.lengths", _LENGTHS, [-1]))
            if self.is_weighted:
                listed.append(_metadata(f"{prefix}.weights", _WEIGHTS, [-1]))
        listed.extend(_metadata(each.name, _VALUES, [-1, -1]) for each in self.features)
        return listed

    def layout(self, head: RequestHead) -> Layout:
        """Returns where a request has what the model takes.

        Raises:
            RequestError: it lacks a tensor, or has one that does not fit, or too many samples.
        """
        numbers: dict[str, int] = {}
        for number, tensor in enumerate(head.tensors):
            if tensor.name in numbers:
                raise bad(f"tensor '{tensor.name}' is there twice")
            if tensor.datatype not in DTYPES:
                raise bad(
                    f"tensor '{tensor.name}' has datatype '{tensor.datatype}', but none takes that"
                )
            numbers[tensor.name] = number
        return _Reading(self, head.tensors, numbers).layout()

    def read(self, layout: Layout, contents: Sequence[NDArray[Any]]) -> Features:
        """Returns the features of a request.

        Args:
            layout: where they are.
            contents: elements of each tensor, [elements]. Of dense features a view is kept.

        Raises:
            RequestError: an id is out of range, or lengths do not fit.
        """
        places, samples = layout.places, layout.samples
        values = [contents[place.values] for place in places]
        lengths = [
            np.full(1 if place.broadcast else samples, place.fixed, dtype=np.int32)
            if place.lengths is None
            else contents[place.lengths]
            for place in places
        ]
        if len(places) == len(self.features):
            broadcast = tuple(place.broadcast for place in places)
        else:
            broadcast = (False,) * len(self.features)
        # Copies, since native code reads no numbers that begin at any byte, nor those of `bytes`.
        all_values, all_lengths = np.concatenate(values), np.concatenate(lengths)
        if len(places) == 1:
            name = self.features[0].name if len(self.features) == 1 else ALL
            counts = self._checked(name, range(len(self.features)), all_lengths, all_values)
        elif any(broadcast):
            counts = self._checked_alone(lengths, values)
        else:
            counts = self._checked_together(lengths, values, all_lengths, all_values)
        dense = None
        if layout.dense is not None:
            dense = contents[layout.dense].reshape(-1, self.dense_columns)
            if not np.isfinite(dense).all():
                raise bad(f"tensor '{DENSE}' has elements that are NaN or infinite")
        return Features(
            samples,
            dense,
            all_values,
            all_lengths,
            self._weights(places, contents) if self.is_weighted else None,
            np.array(counts, dtype=np.int64),
            broadcast,
        )

    def _checked_together(
        self,
        lengths: Sequence[NDArray[np.int32]],
        values: Sequence[NDArray[np.int64]],
        all_lengths: NDArray[np.int32],
        all_values: NDArray[np.int64],
    ) -> list[int]:
        """Returns the number of ids of each feature, of features that all have a sample for each of
        the request: what is wrong is told of one of them alone, but seldom."""
        try:
            counts, found = self._check(range(len(self.features)), all_lengths, all_values)
        except ValueError:
            return self._checked_alone(lengths, values)
        if found is not None or counts != [each.size for each in values]:
            return self._checked_alone(lengths, values)
        return counts

    def _checked_alone(
        self, lengths: Sequence[NDArray[np.int32]], values: Sequence[NDArray[np.int64]]
    ) -> list[int]:
        """Returns the number of ids of each feature."""
        counts = []
        for number, each in enumerate(zip(lengths, values, strict=True)):
            own = range(number, number + 1)
            counts += self._checked(self.features[number].name, own, *map(np.array, each))
        return counts

    def _checked(
        self,
        name: str,
        numbers: range,
        lengths: NDArray[np.int32],
        values: NDArray[np.int64],
    ) -> list[int]:
        """Returns the number of ids of some features.

        Args:
            name: prefix of their tensors.
            numbers: their numbers.
            lengths: numbers of ids of their samples, feature after feature.
            values: the ids.

        Raises:
            RequestError: lengths and ids do not fit each other, or an id is out of range.
        """
        try:
            counts, found = self._check(numbers, lengths, values)
        except ValueError:
            if lengths.min(initial=0) < 0:
                raise bad(f"tensor '{name}.lengths' has negative lengths") from None
            raise bad(
                f"tensor '{name}.lengths' counts {lengths.sum(dtype=np.int64)} ids, but "
                f"'{name}.values' has {values.size}"
            ) from None
        if found is not None:
            number, _, value = found
            feature = self.features[numbers[number]]
            raise bad(
                f"feature '{feature.name}' has id {value}, but its table has {feature.rows} rows"
            )
        return counts

    def _check(
        self, numbers: range, lengths: NDArray[np.int32], values: NDArray[np.int64]
    ) -> tuple[list[int], tuple[int, int, int] | None]:
        return _native.check_ids(
            torch.from_numpy(lengths),
            torch.from_numpy(values),
            None,
            lengths.size // len(numbers),
            self._rows[numbers.start : numbers.stop],
        )

    def _weights(
        self, places: Sequence[_Place], contents: Sequence[NDArray[Any]]
    ) -> NDArray[np.float32]:
        weights = [
            np.ones(contents[place.values].size, dtype=np.float32)
            if place.weights is None
            else contents[place.weights]
            for place in places
        ]
        joined: NDArray[np.float32] = np.concatenate(weights)
        if not np.isfinite(joined).all():
            raise bad("weights of ids are NaN or infinite")
        return joined


class _Reading:
    """The reading of one head."""

    def __init__(
        self, inputs: ModelInputs, tensors: Sequence[TensorHead], numbers: dict[str, int]
    ) -> None:
        self._inputs = inputs
        self._tensors = tensors
        self._numbers = numbers
        self._samples: int | None = None
        self._samples_of = ""

    def layout(self) -> Layout:
        inputs = self._inputs
        dense = self._dense() if inputs.dense_columns else None
        places = [self._ragged(ALL, len(inputs.features))]
        if places[0] is None:
            places = [self._of_feature(each.name) for each in inputs.features]
        if self._numbers:
            raise bad(
                f"the model takes no tensor '{next(iter(self._numbers))}': "
                "GET /v2/models/NAME lists those that it takes"
            )
        samples = 1 if self._samples is None else self._samples
        if samples > inputs.max_samples:
            raise RequestError(
                Outcome.TOO_LARGE,
                f"the request has {samples} samples, but may have {inputs.max_samples}: send "
                "several",
            )
        found = [place for place in places if place is not None]
        ids = sum(prod(self._tensors[place.values].shape) for place in found)
        return Layout(samples, ids, dense, found)

    def _dense(self) -> int:
        number = self._take(DENSE, "FP32", 2)
        rows, columns = self._tensors[number].shape
        if columns != self._inputs.dense_columns:
            raise bad(
                f"tensor '{DENSE}' has {columns} columns, but the model takes "
                f"{self._inputs.dense_columns}"
            )
        self._see_samples(DENSE, rows, self._tensors[number].broadcast)
        return number

    def _of_feature(self, name: str) -> _Place:
        place = self._ragged(name, 1)
        if place is not None:
            return place
        if name not in self._numbers:
            raise bad(
                f"the request lacks feature '{name}': give '{name}', or '{name}.values' and "
                f"'{name}.lengths', or all features as '{ALL}.values' and '{ALL}.lengths'"
            )
        number = self._take(name, _VALUES, 1, 2)
        tensor = self._tensors[number]
        self._see_samples(name, tensor.shape[0], tensor.broadcast)
        fixed = tensor.shape[1] if len(tensor.shape) == 2 else 1
        return _Place(number, None, None, fixed, tensor.broadcast)

    def _ragged(self, prefix: str, features: int) -> _Place | None:
        names = _ragged_names(prefix)
        if self._numbers.keys().isdisjoint(names):
            return None
        values, lengths = self._take(names[0], _VALUES, 1), self._take(names[1], _LENGTHS, 1)
        broadcast = self._tensors[values].broadcast or self._tensors[lengths].broadcast
        if broadcast and prefix == ALL:
            raise bad(f"'{ALL}.values' has all features, of which none can be broadcast")
        length = self._tensors[lengths].shape[0]
        if length % features:
            raise bad(
                f"tensor '{names[1]}' has {length} elements, but needs one for each sample of "
                f"{features} features"
            )
        self._see_samples(names[1], length // features, broadcast)
        weights = None
        if names[2] in self._numbers:
            if not self._inputs.is_weighted:
                raise bad(f"tensor '{names[2]}' is there, but the model takes no weights")
            weights = self._take(names[2], _WEIGHTS, 1)
            if self._tensors[weights].shape != self._tensors[values].shape:
                raise bad(f"tensor '{names[2]}' has not as many elements as '{names[0]}'")
        return _Place(values, lengths, weights, 0, broadcast)

    def _take(self, name: str, datatype: str, *dimensions: int) -> int:
        """Returns the number of a tensor, which is there once."""
        number = self._numbers.pop(name, None)
        if number is None:
            raise bad(f"the request lacks tensor '{name}'")
        tensor = self._tensors[number]
        if tensor.datatype != datatype:
            raise bad(f"tensor '{name}' has datatype '{tensor.datatype}', but must have {datatype}")
        if len(tensor.shape) not in dimensions:
            raise bad(
                f"tensor '{name}' has {len(tensor.shape)} dimensions, but must have "
                f"{' or '.join(map(str, dimensions))}"
            )
        if not 0 <= min(tensor.shape) <= max(tensor.shape) <= _LARGEST:
            raise bad(
                f"tensor '{name}' must have sizes from 0 to {_LARGEST}, but has shape "
                f"{list(tensor.shape)}"
            )
        return number

    def _see_samples(self, name: str, samples: int, broadcast: bool) -> None:
        if broadcast:
            if samples != 1:
                raise bad(f"tensor '{name}' is broadcast, but has {samples} samples, not 1")
        elif self._samples is None:
            self._samples, self._samples_of = samples, name
        elif self._samples != samples:
            raise bad(
                f"tensor '{name}' has {samples} samples, but '{self._samples_of}' has "
                f"{self._samples}"
            )


@cache
def _ragged_names(prefix: str) -> tuple[str, str, str]:
    """Returns the names of tensors of a feature, or of all. Features of models are few."""
    return f"{prefix}.values", f"{prefix}.lengths", f"{prefix}.weights"


def features_in(model: nn.Module) -> tuple[tuple[Feature, ...], bool]:
    """Returns the features of a model, and whether their ids have weights.

    Args:
        model: the model, before it has attached.
    """
    rows: dict[str, int] = {}
    collections = collections_of(model).values()
    for config in chain.from_iterable(each.configs for each in collections):
        for name in config.feature_names:
            rows[name] = min(config.num_embeddings, rows.get(name, config.num_embeddings))
    features = tuple(Feature(name, count) for name, count in rows.items())
    return features, any(each.is_weighted for each in collections)


def _metadata(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}
