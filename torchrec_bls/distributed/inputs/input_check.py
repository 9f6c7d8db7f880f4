"""The checks of a sharded module's input, before a byte of it is read."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.distributed.inputs.variable_batch import padded, varies, with_batch_sizes_of

_NO_LIMIT = (1 << 63) - 1
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# These are TorchRec's dtypes. Its lookups turn all integers into int64.
_OTHER_INTEGERS = (torch.int8, torch.uint8, torch.int16)


class CheckedBatch(NamedTuple):
    """Input that can be sent.

    Attributes:
        features: features with tensors on the CPU, contiguous, of dtypes and sizes for native code.
        counts: number of ids of each key.
        varying: the same ids with a batch size per key, if they came so; `features` are padded
            then.
    """

    features: KeyedJaggedTensor
    counts: list[int]
    varying: KeyedJaggedTensor | None = None


class InputCheck:
    """Checks the batches of one module.

    Args:
        name: name of the module in errors.
        tables: an EmbeddingConfig or EmbeddingBagConfig for each table.
        is_weighted: whether ids have weights.
        bad_ids: treatment of an id that its table has no row for. "refuse" raises; "row0" looks up
            row 0 instead, as TorchRec does.

    Attributes:
        is_weighted: whether ids have weights.
        bad_ids: see above.
        keys: keys of all batches; None before the first.
        replaced_ids: number of ids for which row 0 was looked up.
        refused_batches: number of batches that `check` raised for.
    """

    def __init__(self, name: str, tables: Iterable[Any], is_weighted: bool, bad_ids: str) -> None:
        self.keys: list[str] | None = None
        self.replaced_ids = 0
        self.refused_batches = 0
        self._name = name
        self._rows_by_feature = _rows_by_feature(tables)
        self.is_weighted = is_weighted
        self.bad_ids = bad_ids
        self._row_limits: list[int] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._inverse_keys: list[str] | None = None

    def check(self, features: object) -> CheckedBatch:
        """Returns `features` in a form that can be sent.

        Raises:
            ValueError: the features do not fit the module; the text says what to change.
        """
        try:
            return self._checked(features)
        except Exception:  # whatever a batch holds
            self.refused_batches += 1
            raise

    def _checked(self, features: object) -> CheckedBatch:
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(f"input is a {type(features).__name__}, not a KeyedJaggedTensor")
        of_one_size = self._padded(features) if varies(features) else features
        keys = features.keys()
        if keys != self.keys:
            self._learn_keys(keys)
        if self._is_like_the_first(of_one_size):
            checked = self._check_ids(of_one_size)
            sent = checked.features
        else:
            checked = self._check_ids(_readable(of_one_size))
            sent = self._of_first_dtypes(checked.features)
        varying = None if of_one_size is features else with_batch_sizes_of(features, sent)
        return CheckedBatch(sent, checked.counts, varying)

    def _is_like_the_first(self, features: KeyedJaggedTensor) -> bool:
        """Returns whether `_readable` and `_of_first_dtypes` would return `features` unchanged.
        They would for nearly all batches, and take longer than a small exchange."""
        lengths, values, weights = features.lengths(), features.values(), features.weights_or_none()
        dtypes = self._dtypes
        if weights is None:
            are_plain = "weights" not in dtypes
        else:
            are_plain = (
                weights.dtype == dtypes.get("weights")
                and weights.is_cpu
                and weights.is_contiguous()
                and weights.numel() == values.numel()
            )
        return (
            are_plain
            and lengths.dtype == dtypes.get("lengths")
            and values.dtype == dtypes.get("values")
            and lengths.is_cpu
            and values.is_cpu
            and lengths.is_contiguous()
            and values.is_contiguous()
            and lengths.numel() == len(self._row_limits) * features.stride()
        )

    def _padded(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        of_one_size = padded(features, self._rows_by_feature)
        keys = features.inverse_indices()[0]
        if self._inverse_keys not in (None, keys):  # TorchRec keeps the first batch's order
            raise ValueError(
                f"inverse_indices are given for {keys}, but those of an earlier batch for "
                f"{self._inverse_keys}: keep keys and their order the same in all batches"
            )
        self._inverse_keys = list(keys)
        return of_one_size

    def _of_first_dtypes(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns `features` in the dtypes of the first batch. The messages of all ranks must
        agree, and one request must not fail the others' requests."""
        tensors = _tensors_of(features)
        if not self._dtypes:
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if tensors.keys() != self._dtypes.keys():
            there, wanted = ("no", "some") if len(tensors) == 2 else ("some", "no")
            raise ValueError(
                f"the KeyedJaggedTensor has {there} weights, but that of the first batch had "
                f"{wanted}: keep to one in all batches"
            )
        changed = {
            name: tensor.to(self._dtypes[name])
            for name, tensor in tensors.items()
            if tensor.dtype != self._dtypes[name]
        }
        if changed and not torch.equal(features.values(), changed.get("values", features.values())):
            raise ValueError(
                f"the KeyedJaggedTensor has ids that {self._dtypes['values']} cannot hold, which "
                "those of the first batch were of: keep to one dtype in all batches"
            )
        return _with(features, **changed) if changed else features

    def nothing(self) -> CheckedBatch:
        """Returns a batch without samples."""
        keys = self.keys or list(self._rows_by_feature)
        features = KeyedJaggedTensor(
            keys=keys,
            values=torch.empty(0, dtype=torch.int64),
            weights=torch.empty(0) if self.is_weighted else None,
            lengths=torch.empty(0, dtype=torch.int32),
            stride=0,
        )
        return CheckedBatch(features, [0] * len(keys))

    def _learn_keys(self, keys: list[str]) -> None:
        unknown = [key for key in keys if key not in self._rows_by_feature]
        missing = [key for key in self._rows_by_feature if key not in keys]
        if missing:
            raise ValueError(
                f"the KeyedJaggedTensor lacks the features {missing} of the module"
                + (f" and has keys that the module does not have: {unknown}" if unknown else "")
            )
        if self.keys is not None:
            raise ValueError(
                f"the keys are {keys}, but those of the first batch were {self.keys}: keep "
                "keys and their order the same in all batches"
            )
        if unknown:
            warnings.warn(
                f"{self._name}: the KeyedJaggedTensor has keys that the module does not have, "
                f"which are ignored: {unknown}",
                stacklevel=6,
            )
        self.keys = list(keys)
        self._row_limits = [self._rows_by_feature.get(key, _NO_LIMIT) for key in keys]

    def _check_ids(self, features: KeyedJaggedTensor) -> CheckedBatch:
        lengths, values = features.lengths(), features.values()
        try:
            counts, bad = _native.check_ids(
                (lengths.data_ptr(), lengths.element_size()),
                (values.data_ptr(), values.element_size()),
                features.stride(),
                values.numel(),
                self._row_limits,
            )
        except ValueError as error:
            raise ValueError(f"malformed KeyedJaggedTensor: {error}") from error
        if bad is None:
            return CheckedBatch(features, counts)
        if self.bad_ids == "row0":
            return CheckedBatch(self._with_row_0(features, counts), counts)
        feature, position, value = bad
        key, rows = features.keys()[feature], self._row_limits[feature]
        raise ValueError(
            f"id {value} at position {position} of feature '{key}' is out of range: its table "
            f"has {rows} rows, so ids go from 0 to {rows - 1}"
        )

    def _with_row_0(self, features: KeyedJaggedTensor, counts: list[int]) -> KeyedJaggedTensor:
        values = features.values()
        limits = torch.tensor(self._row_limits).repeat_interleave(torch.tensor(counts))
        bad = (values < 0) | (values >= limits)
        if self.replaced_ids == 0:
            warnings.warn(
                f"{self._name}: ids that their tables have no rows for are looked up as row 0 "
                '(bad_ids="row0"); replaced_ids counts them',
                stacklevel=7,
            )
        self.replaced_ids += int(bad.sum())
        return _with(features, values=values.masked_fill(bad, 0))


def _rows_by_feature(tables: Iterable[Any]) -> dict[str, int]:
    """Returns the smallest number of rows among the tables that each feature is looked up in."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(table.num_embeddings, rows.get(feature, table.num_embeddings))
    return rows


def _readable(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns `features` in memory that native code may read.

    Raises:
        ValueError: a tensor is on another device, has another kind of numbers, or another size than
            the batch.
    """
    tensors = _tensors_of(features)
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"the KeyedJaggedTensor's {name} are on {tensor.device}, but its rows are looked "
                "up on the CPU: give it the batch before it is moved, or features.to('cpu')"
            )
        if tensor.dtype in _OTHER_INTEGERS and name != "weights":
            changed[name] = tensor.to(torch.int32)
        elif tensor.dtype not in (_FLOATS if name == "weights" else _INTEGERS):
            wanted = "floats" if name == "weights" else "integers"
            raise ValueError(f"the KeyedJaggedTensor's {name} are {tensor.dtype}, not {wanted}")
        elif not tensor.is_contiguous():
            changed[name] = tensor.contiguous()
    ids, weights = tensors["values"].numel(), tensors.get("weights")
    if weights is not None and weights.numel() != ids:
        raise ValueError(f"the KeyedJaggedTensor has {weights.numel()} weights for {ids} ids")
    keys, stride, lengths = len(features.keys()), features.stride(), tensors["lengths"].numel()
    if lengths != keys * stride:
        raise ValueError(
            f"the KeyedJaggedTensor has {lengths} lengths, but {keys} keys and stride {stride} "
            f"make {keys * stride}"
        )
    return _with(features, **changed) if changed else features


def _tensors_of(features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    tensors = {"lengths": features.lengths(), "values": features.values()}
    weights = features.weights_or_none()
    return tensors if weights is None else tensors | {"weights": weights}


def _with(features: KeyedJaggedTensor, **changed: torch.Tensor) -> KeyedJaggedTensor:
    tensors: Mapping[str, torch.Tensor] = _tensors_of(features) | changed
    return KeyedJaggedTensor(keys=features.keys(), stride=features.stride(), **tensors)
