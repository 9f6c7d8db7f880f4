"""Samples, the requests that ask for them in all forms, and the same samples one by one."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.inputs import Feature, Features, ModelInputs

FEATURES = (Feature("user", 50), Feature("item", 7), Feature("tags", 30))
KEYS = [each.name for each in FEATURES]
DENSE_COLUMNS = 3
MOST_SAMPLES = 6
#: Ids that a feature of a sample has at most.
MOST_IDS = 4
_DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}


def inputs_of(is_weighted: bool = False, features: tuple[Feature, ...] = FEATURES) -> ModelInputs:
    return ModelInputs(features, DENSE_COLUMNS, is_weighted, MOST_SAMPLES)


@dataclass(frozen=True)
class Sample:
    """A sample, as a caller means it.

    Attributes:
        dense: its dense features.
        ids: its ids of each feature.
        weights: their weights.
    """

    dense: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def alone(self, is_weighted: bool) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Returns the input of a model for this sample alone."""
        flat = [each for of_feature in self.weights for each in of_feature]
        return torch.tensor([self.dense]), KeyedJaggedTensor(
            KEYS,
            torch.tensor([each for of_feature in self.ids for each in of_feature]).long(),
            torch.tensor(flat, dtype=torch.float32) if is_weighted else None,
            lengths=torch.tensor([len(each) for each in self.ids], dtype=torch.int32),
        )


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        tensors: heads of its tensors.
        contents: their elements.
        samples: what it asks for.
    """

    tensors: tuple[TensorHead, ...]
    contents: tuple[bytes, ...]
    samples: tuple[Sample, ...]

    @property
    def head(self) -> RequestHead:
        return RequestHead(None, "", self.tensors)

    def features(self, inputs: ModelInputs) -> Features:
        """Returns what the service reads of it. Tensors lie at any byte of a message."""
        arrays = [
            np.frombuffer(memoryview(b"x" + content)[1:], dtype=_DTYPES[tensor.datatype])
            for tensor, content in zip(self.tensors, self.contents, strict=True)
        ]
        return inputs.read(inputs.layout(self.head), arrays)

    def with_tensor(self, name: str, **changes: object) -> "Asked":
        """Returns the request with another head of a tensor."""
        assert any(each.name == name for each in self.tensors)
        return replace(
            self,
            tensors=tuple(
                replace(each, **changes) if each.name == name else each for each in self.tensors
            ),
        )


class _Tensors:
    def __init__(self) -> None:
        self.heads: list[TensorHead] = []
        self.contents: list[bytes] = []

    def add(
        self, name: str, datatype: str, shape: list[int], content: object, broadcast: bool = False
    ) -> None:
        array = np.array(content, dtype=_DTYPES[datatype]).reshape(-1)
        assert array.size == np.prod(shape, dtype=int)
        self.heads.append(TensorHead(name, datatype, tuple(shape), broadcast))
        self.contents.append(array.tobytes())


# Sums of these are exact in any order.
_dense = st.tuples(*[st.integers(-8, 8).map(float)] * DENSE_COLUMNS)
_weight = st.integers(-4, 4).map(float)


@st.composite
def requests(
    draw: st.DrawFn, is_weighted: bool = False, may_broadcast: bool = True, least: int = 1
) -> Asked:
    """Draws a request in any form."""
    count = draw(st.integers(least, MOST_SAMPLES))
    made = _Tensors()
    is_shared = may_broadcast and draw(st.booleans())
    rows = [draw(_dense) for _ in range(1 if is_shared else count)]
    made.add("dense", "FP32", [len(rows), DENSE_COLUMNS], rows, is_shared)
    repeats = max(1, count)
    dense = rows * repeats if is_shared else rows
    is_one = is_shared  # as long as nothing says how many samples there are
    all_ids: list[list[tuple[int, ...]]] = []
    all_weights: list[list[tuple[float, ...]]] = []
    if draw(st.booleans()):
        is_one = False
        for feature in FEATURES:
            all_ids.append([draw(_ids(feature)) for _ in range(count)])
        all_weights = _add_ragged(draw, made, "ids", all_ids, is_weighted, False)
    else:
        for feature in FEATURES:
            broadcast = may_broadcast and draw(st.booleans())
            of_rows = 1 if broadcast else count
            is_one = is_one and broadcast
            if draw(st.booleans()):
                fixed = draw(st.integers(0, MOST_IDS))
                ids = [draw(_ids(feature, fixed)) for _ in range(of_rows)]
                is_flat = fixed == 1 and draw(st.booleans())
                shape = [of_rows] if is_flat else [of_rows, fixed]
                made.add(feature.name, "INT64", shape, _flat(ids), broadcast)
                weights = [(1.0,) * fixed for _ in ids]
            else:
                ids = [draw(_ids(feature)) for _ in range(of_rows)]
                [weights] = _add_ragged(draw, made, feature.name, [ids], is_weighted, broadcast)
            all_ids.append(ids * repeats if broadcast else ids)
            all_weights.append(weights * repeats if broadcast else weights)
    order = draw(st.permutations(range(len(made.heads))))
    samples = [
        Sample(
            dense[number],
            tuple(each[number] for each in all_ids),
            tuple(each[number] for each in all_weights),
        )
        for number in range(1 if is_one else count)
    ]
    return Asked(
        tuple(made.heads[each] for each in order),
        tuple(made.contents[each] for each in order),
        tuple(samples),
    )


def _ids(feature: Feature, count: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    least, most = (0, MOST_IDS) if count is None else (count, count)
    ids = st.integers(0, feature.rows - 1)
    return st.lists(ids, min_size=least, max_size=most).map(tuple)


def _add_ragged(
    draw: st.DrawFn,
    made: _Tensors,
    prefix: str,
    ids: list[list[tuple[int, ...]]],
    is_weighted: bool,
    broadcast: bool,
) -> list[list[tuple[float, ...]]]:
    """Adds the ids of features, and returns their weights."""
    flat = [each for of_feature in ids for each in _flat(of_feature)]
    lengths = [len(of_sample) for of_feature in ids for of_sample in of_feature]
    # Either of the two says it for both.
    where = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    in_values, in_lengths = [broadcast and each for each in where]
    made.add(f"{prefix}.values", "INT64", [len(flat)], flat, in_values)
    made.add(f"{prefix}.lengths", "INT32", [len(lengths)], lengths, in_lengths)
    if not is_weighted or draw(st.booleans()):
        return [[(1.0,) * len(of_sample) for of_sample in of_feature] for of_feature in ids]
    weights = [
        [tuple(draw(_weight) for _ in of_sample) for of_sample in of_feature] for of_feature in ids
    ]
    flat_weights = [each for of_feature in weights for each in _flat(of_feature)]
    made.add(f"{prefix}.weights", "FP32", [len(flat_weights)], flat_weights)
    return weights


def _flat(of_samples: list[tuple[float, ...]] | list[tuple[int, ...]]) -> list[float | int]:
    return [each for of_sample in of_samples for each in of_sample]
