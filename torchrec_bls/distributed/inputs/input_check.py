"""The checks of a sharded module's input, before a byte of it is read."""

import warnings
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_bls import _native
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.under_way import ForwardsUnderWay, LateBadId
from torchrec_bls.distributed.inputs.variable_batch import (
    padded,
    varies,
    with_all_samples,
    with_batch_sizes_of,
)
from torchrec_bls.lifetime import new_lock

_NO_LIMIT = (1 << 63) - 1
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# These are TorchRec's dtypes. Its lookups turn all integers into int64.
_OTHER_INTEGERS = (torch.int8, torch.uint8, torch.int16)
# Held for what threads of one module count and learn. One for all, so that checks can be copied.
_CHANGING = new_lock()


class CheckedBatch(NamedTuple):
    """Input that can be sent.

    Attributes:
        features: features with tensors on the CPU, contiguous, of dtypes and sizes for native code.
        counts: number of ids of each key.
        varying: the same ids with a batch size per key, if they came so; `features` are padded
            then.
        is_on_gpu: whether the tensors are on the GPU that reads the tables, and checks the ids
            then. `counts` is empty until `counted`.
    """

    features: KeyedJaggedTensor
    counts: list[int]
    varying: KeyedJaggedTensor | None = None
    is_on_gpu: bool = False

    def counted(self) -> "CheckedBatch":
        """Returns the batch with its counts. Of a batch on a GPU, the host waits for them, unless
        the KeyedJaggedTensor has kept them since it was on the host.

        Raises:
            ValueError: it has more or fewer ids.
        """
        if not self.is_on_gpu:
            return self
        counts, ids = self.features.length_per_key(), self.features.values().numel()
        if sum(counts) != ids:
            raise ValueError(
                f"malformed KeyedJaggedTensor: its lengths make {sum(counts)} ids, but it has {ids}"
            )
        return self._replace(counts=list(counts))

    def in_full(self, used: Container[str]) -> "CheckedBatch":
        """Returns the batch with the ids of each sample under each key, of one size.

        Args:
            used: keys that are used. Others get no ids if the batch has a size per key.
        """
        if self.varying is None:
            return self
        inverse = self.varying.inverse_indices()
        return CheckedBatch(*with_all_samples(self.features, self.counts, inverse, used))


class _Learned(NamedTuple):
    """What all batches have to keep to after the first one.

    Attributes:
        keys: keys of the batches.
        row_limits: numbers of rows of the keys' tables.
        has_weights: whether ids came with weights.
    """

    keys: list[str]
    row_limits: list[int]
    has_weights: bool


class InputCheck:
    """Checks the batches of one module, in any number of threads.

    Args:
        name: name of the module in errors.
        tables: an EmbeddingConfig or EmbeddingBagConfig for each table.
        is_weighted: whether ids have weights.
        bad_ids: treatment of an id that its table has no row for. "refuse" raises; "row0" looks up
            row 0 instead, as TorchRec does.

    Attributes:
        is_weighted: whether ids have weights.
        bad_ids: see above.
        replaced_ids: number of ids for which row 0 was looked up.
        refused_batches: number of batches that `check` raised for.
    """

    def __init__(self, name: str, tables: Iterable[Any], is_weighted: bool, bad_ids: str) -> None:
        self.replaced_ids = 0
        self.refused_batches = 0
        self._name = name
        self._tables = list(tables)
        self._rows_by_feature = _rows_by_feature(self._tables)
        self.is_weighted = is_weighted
        self.bad_ids = bad_ids
        # One attribute, since a thread must not see a half of it.
        self._learned: _Learned | None = None
        self._inverse_keys: list[str] | None = None
        self._has_warned = False

    def begin_in_child(self) -> None:
        """Lets the counts of a forked child begin at 0."""
        self.replaced_ids = self.refused_batches = 0

    @property
    def keys(self) -> list[str] | None:
        """Returns the keys of all batches; None before the first batch with samples was
        accepted."""
        learned = self._learned
        return None if learned is None else learned.keys

    def check(self, features: object, late: ForwardsUnderWay | None = None) -> CheckedBatch:
        """Returns `features` in a form that can be sent.

        Args:
            features: the features.
            late: forwards whose ids their GPU checks; None: ids have to be on the host.

        Raises:
            ValueError: the features do not fit the module; the text says what to change. Or those
                of an earlier batch did not, see `check_earlier`.
        """
        if late is not None:
            self.check_earlier(late)
        try:
            return self._checked(features, None if late is None else late.gpu)
        except Exception:  # whatever a batch holds
            with _CHANGING:
                self.refused_batches += 1
            raise

    def check_earlier(self, late: ForwardsUnderWay) -> None:
        """Raises ValueError if a GPU has found a bad id in an earlier batch. Each batch is told
        once."""
        bad = late.next_bad_id()
        if bad is not None:
            with _CHANGING:
                self.refused_batches += 1
            raise ValueError(self._told(bad))

    def _told(self, bad: LateBadId) -> str:
        batch = f"batch {bad.batch}, looked up in version {bad.version!r}"
        if bad.position is None:
            return f"{batch}: the lengths of feature '{bad.key}' do not fit the ids"
        of_feature = [table for table in self._tables if bad.key in table.feature_names]
        table = min(of_feature, key=lambda each: each.num_embeddings)
        return (
            f"{batch}: id {bad.id} of feature '{bad.key}', at position {bad.position} of all ids, "
            f"is out of range: table '{table.name}' has {table.num_embeddings} rows, so ids go "
            f"from 0 to {table.num_embeddings - 1}"
        )

    def _checked(self, features: object, gpu: Gpu | None) -> CheckedBatch:
        if isinstance(features, TensorDict):
            features = self._joined(features)
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(f"input is a {type(features).__name__}, not a KeyedJaggedTensor")
        is_varying = varies(features)
        if is_varying and gpu is not None and gpu.has(features.values()):
            raise ValueError(
                "the KeyedJaggedTensor has a batch size per key, which takes it on the CPU: give "
                "the batch before it is moved"
            )
        of_one_size = self._padded(features) if is_varying else features
        keys = features.keys()
        learned = self._learned
        row_limits = self._row_limits(keys, learned)
        checked = self._check_ids(of_one_size, row_limits, gpu)
        if learned is not None and learned.has_weights != (features.weights_or_none() is not None):
            there, wanted = ("no", "some") if learned.has_weights else ("some", "no")
            raise ValueError(
                f"the KeyedJaggedTensor has {there} weights, but that of the first batch had "
                f"{wanted}: keep to one in all batches"
            )
        if is_varying:
            checked = checked._replace(varying=with_batch_sizes_of(features, checked.features))
        is_news = learned is None or (is_varying and self._inverse_keys is None)
        if is_news and of_one_size.stride() > 0:
            self._learn(features, row_limits)
        return checked

    def check_processed(
        self,
        features: KeyedJaggedTensor,
        batch: CheckedBatch,
        late: ForwardsUnderWay | None = None,
    ) -> CheckedBatch:
        """Returns features that a feature processor has made of an accepted batch.

        Args:
            features: the features.
            batch: the batch.
            late: see `check`.

        Raises:
            ValueError: they do not fit the module.
        """
        keys = features.keys()
        row_limits = self._row_limits(keys, self._learned)
        gpu = None if late is None else late.gpu
        return self._check_ids(features, row_limits, gpu)._replace(varying=batch.varying)

    def _joined(self, features: Any) -> KeyedJaggedTensor:
        """Returns a TensorDict of jagged tensors as one KeyedJaggedTensor, as TorchRec does."""
        there = list(features.keys())
        keys = [key for key in self.keys or there if key in there]
        try:
            return maybe_td_to_kjt(features, keys)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                "the TensorDict has entries that are no jagged tensors: make them by "
                "torch.nested.nested_tensor(..., layout=torch.jagged)"
            ) from error

    def _padded(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        of_one_size = padded(features, self._rows_by_feature)
        keys = features.inverse_indices()[0]
        if self._inverse_keys not in (None, keys):  # TorchRec keeps the first batch's order
            raise ValueError(
                f"inverse_indices are given for {keys}, but those of an earlier batch for "
                f"{self._inverse_keys}: keep keys and their order the same in all batches"
            )
        return of_one_size

    def _learn(self, features: KeyedJaggedTensor, row_limits: list[int]) -> None:
        """Remembers what all later batches have to keep to.

        Args:
            features: an accepted batch with samples. Others may be of anything.
            row_limits: numbers of rows of its keys.
        """
        has_weights = features.weights_or_none() is not None
        with _CHANGING:
            if self._inverse_keys is None and varies(features):
                self._inverse_keys = list(features.inverse_indices()[0])
            if self._learned is None:
                self._learned = _Learned(list(features.keys()), row_limits, has_weights)

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

    def _row_limits(self, keys: list[str], learned: _Learned | None) -> list[int]:
        if learned is not None and keys == learned.keys:
            return learned.row_limits
        return self._limits_of(keys, learned)

    def _limits_of(self, keys: list[str], learned: _Learned | None) -> list[int]:
        unknown = [key for key in keys if key not in self._rows_by_feature]
        missing = [key for key in self._rows_by_feature if key not in keys]
        if missing:
            raise ValueError(
                f"the KeyedJaggedTensor lacks the features {missing} of the module"
                + (f" and has keys that the module does not have: {unknown}" if unknown else "")
            )
        if learned is not None:
            raise ValueError(
                f"the keys are {keys}, but those of the first batch were {learned.keys}: keep "
                "keys and their order the same in all batches"
            )
        if unknown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._name}: the KeyedJaggedTensor has keys that the module does not have, "
                f"which are ignored: {unknown}",
                stacklevel=6,
            )
        return [self._rows_by_feature.get(key, _NO_LIMIT) for key in keys]

    def _check_ids(
        self, features: KeyedJaggedTensor, row_limits: list[int], gpu: Gpu | None
    ) -> CheckedBatch:
        if gpu is not None and gpu.has(features.values()):
            if self.bad_ids == "row0":
                raise ValueError(
                    "the KeyedJaggedTensor is on the GPU, where ids are checked but not replaced "
                    '(bad_ids="row0"): give the batch on the CPU, before it is moved'
                )
            return CheckedBatch(_readable(features, gpu), [], is_on_gpu=True)
        try:
            counts, bad = _find_bad_id(features, row_limits)
        except ValueError:
            features = _readable(features)
            try:
                counts, bad = _find_bad_id(features, row_limits)
            except ValueError as error:
                raise ValueError(f"malformed KeyedJaggedTensor: {error}") from error
        if bad is None:
            return CheckedBatch(features, counts)
        if self.bad_ids == "row0":
            return CheckedBatch(self._with_row_0(features, counts, row_limits), counts)
        feature, position, value = bad
        key, rows = features.keys()[feature], row_limits[feature]
        raise ValueError(
            f"id {value} at position {position} of feature '{key}' is out of range: its table "
            f"has {rows} rows, so ids go from 0 to {rows - 1}"
        )

    def _with_row_0(
        self, features: KeyedJaggedTensor, counts: list[int], row_limits: list[int]
    ) -> KeyedJaggedTensor:
        values = features.values()
        limits = torch.tensor(row_limits).repeat_interleave(torch.tensor(counts))
        bad = (values < 0) | (values >= limits)
        if self.replaced_ids == 0:
            warnings.warn(
                f"{self._name}: ids that their tables have no rows for are looked up as row 0 "
                '(bad_ids="row0"); replaced_ids counts them',
                stacklevel=7,
            )
        replaced = int(bad.sum())
        with _CHANGING:
            self.replaced_ids += replaced
        return _with(features, values=values.masked_fill(bad, 0))


def _rows_by_feature(tables: Iterable[Any]) -> dict[str, int]:
    """Returns the smallest number of rows among the tables that each feature is looked up in."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(table.num_embeddings, rows.get(feature, table.num_embeddings))
    return rows


def _find_bad_id(
    features: KeyedJaggedTensor, row_limits: list[int]
) -> tuple[list[int], tuple[int, int, int] | None]:
    """Returns the number of ids of each key; and key, position and value of an id that is out of
    range.

    Raises:
        ValueError: native code can't read the tensors, or lengths and ids do not fit each other.
    """
    return _native.check_ids(
        features.lengths(),
        features.values(),
        features.weights_or_none(),
        features.stride(),
        row_limits,
    )


def _readable(features: KeyedJaggedTensor, gpu: Gpu | None = None) -> KeyedJaggedTensor:
    """Returns `features` in memory that native code may read, or the kernels of a GPU.

    Raises:
        ValueError: a tensor is on another device, has another kind of numbers, or another size than
            the batch.
    """
    tensors = _tensors_of(features)
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if gpu is not None and not gpu.has(tensor):
            raise ValueError(
                f"the KeyedJaggedTensor's {name} are on {tensor.device}, but its ids are on the "
                "GPU: move all of it"
            )
        if gpu is None and tensor.device.type != "cpu":
            raise ValueError(
                f"the KeyedJaggedTensor's {name} are on {tensor.device}, but its ids are read on "
                "the CPU: give it the batch before it is moved, or features.to('cpu')"
            )
        if tensor.dtype in _OTHER_INTEGERS and name != "weights":
            changed[name] = tensor.to(torch.int32)
        elif tensor.dtype not in (_FLOATS if name == "weights" else _INTEGERS):
            wanted = "floats" if name == "weights" else "integers"
            raise ValueError(f"the KeyedJaggedTensor's {name} are {tensor.dtype}, not {wanted}")
        elif name == "weights" and tensor.dtype != torch.float32:
            # FBGEMM's lookups take float32, and its permutations no half floats.
            changed[name] = tensor.float().contiguous()
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
    return KeyedJaggedTensor(
        keys=features.keys(),
        stride=features.stride(),
        length_per_key=features.length_per_key_or_none(),
        **tensors,
    )
