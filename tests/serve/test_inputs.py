"""What fits the model is read as the caller means it, and what does not is refused by its name."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.serve.models import Bags, Rows
from tests.serve.samples import DENSE_COLUMNS, FEATURES, MOST_SAMPLES, Asked, inputs_of, requests
from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.inputs import Feature, ModelInputs, features_in
from torchrec_bls.serve.outcomes import Outcome, RequestError

DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}


def tensor(name: str, datatype: str, shape: list[int], content: Any, **flags: bool) -> Any:
    head = TensorHead(name, datatype, tuple(shape), **flags)
    return head, np.array(content, dtype=DTYPES[datatype]).reshape(-1)


def dense(samples: int = 2, value: float = 0.5, **flags: bool) -> Any:
    shape = [samples, DENSE_COLUMNS]
    return tensor("dense", "FP32", shape, [value] * (samples * DENSE_COLUMNS), **flags)


def fixed(name: str, *ids: int, **flags: bool) -> Any:
    return tensor(name, "INT64", [len(ids)], ids, **flags)


def ragged(prefix: str, lengths: list[int], ids: list[int], weights: Any = None) -> list[Any]:
    made = [
        tensor(f"{prefix}.values", "INT64", [len(ids)], ids),
        tensor(f"{prefix}.lengths", "INT32", [len(lengths)], lengths),
    ]
    if weights is not None:
        made.append(tensor(f"{prefix}.weights", "FP32", [len(weights)], weights))
    return made


def features(**changes: Any) -> list[Any]:
    """Returns tensors of two samples; those of a feature may be others."""
    made: dict[str, Any] = {each.name: fixed(each.name, 1, 2) for each in FEATURES} | changes
    return [one for each in made.values() for one in (each if isinstance(each, list) else [each])]


def read(inputs: ModelInputs, tensors: list[Any]) -> Any:
    head = RequestHead(None, "", tuple(each for each, _ in tensors))
    return inputs.read(inputs.layout(head), [content for _, content in tensors])


def test_a_request_that_fits() -> None:
    found = read(inputs_of(), [dense(), *features()])
    assert (found.samples, found.ids, found.counts.tolist()) == (2, 6, [2, 2, 2])
    assert found.values.tolist() == [1, 2, 1, 2, 1, 2]
    assert found.weights is None and found.broadcast == (False,) * 3


HUGE = 2**31

CASES: dict[str, tuple[list[Any], str]] = {
    "no dense": (features(), "lacks tensor 'dense'"),
    "twice": ([dense(), dense(), *features()], "tensor 'dense' is there twice"),
    "no feature": ([dense(), *features(item=[])], "lacks feature 'item': give 'item', or 'item.v"),
    "unknown": ([dense(), *features(), fixed("other", 1, 2)], "the model takes no tensor 'other'"),
    "all and one": (
        [dense(), *ragged("ids", [0] * 6, []), fixed("user", 1, 2)],
        "the model takes no tensor 'user'",
    ),
    "in two forms": (
        [dense(), *features(), *ragged("user", [0, 0], [])],
        "the model takes no tensor 'user'",
    ),
    "ids as INT32": (
        [dense(), *features(user=tensor("user", "INT32", [2], [1, 2]))],
        "tensor 'user' has datatype 'INT32', but must have INT64",
    ),
    "lengths as INT64": (
        [dense(), *features(user=[ragged("user", [1, 1], [1, 2])[0], fixed("user.lengths", 1, 1)])],
        "tensor 'user.lengths' has datatype 'INT64', but must have INT32",
    ),
    "dense of one dimension": (
        [tensor("dense", "FP32", [2], [0, 0]), *features()],
        "tensor 'dense' has 1 dimensions, but must have 2",
    ),
    "ids of three dimensions": (
        [dense(), *features(user=tensor("user", "INT64", [2, 1, 1], [1, 2]))],
        "tensor 'user' has 3 dimensions, but must have 1 or 2",
    ),
    "no dimension": (
        [dense(), *features(user=tensor("user", "INT64", [], [1]))],
        "tensor 'user' has 0 dimensions",
    ),
    "dense columns": (
        [tensor("dense", "FP32", [2, 4], [0.0] * 8), *features()],
        "tensor 'dense' has 4 columns, but the model takes 3",
    ),
    "samples": (
        [dense(3), *features()],
        "tensor 'user' has 2 samples, but 'dense' has 3",
    ),
    "broadcast of two": (
        [dense(), *features(user=fixed("user", 1, 2, broadcast=True))],
        "tensor 'user' is broadcast, but has 2 samples, not 1",
    ),
    "broadcast of none": (
        [dense(), *features(user=fixed("user", broadcast=True))],
        "tensor 'user' is broadcast, but has 0 samples, not 1",
    ),
    "broadcast of all": (
        [dense(), *[(h._replace(broadcast=True), c) for h, c in ragged("ids", [0, 0, 0], [])]],
        "'ids.values' has all features, of which none can be broadcast",
    ),
    "lengths of features": (
        [dense(), *ragged("ids", [0] * 5, [])],
        "tensor 'ids.lengths' has 5 elements, but needs one for each sample of 3 features",
    ),
    "values alone": (
        [dense(), *features(user=ragged("user", [], [])[:1])],
        "lacks tensor 'user.lengths'",
    ),
    "lengths alone": (
        [dense(), *features(user=ragged("user", [0, 0], [])[1:])],
        "lacks tensor 'user.values'",
    ),
    "weights": (
        [dense(), *features(user=ragged("user", [1, 1], [1, 2], [1, 2]))],
        "tensor 'user.weights' is there, but the model takes no weights",
    ),
    "negative length": (
        [dense(), *features(user=ragged("user", [-1, 3], [1, 2]))],
        "tensor 'user.lengths' has negative lengths",
    ),
    "too many lengths": (
        [dense(), *features(user=ragged("user", [1, 2], [1, 2]))],
        "tensor 'user.lengths' counts 3 ids, but 'user.values' has 2",
    ),
    "lengths that wrap in 32 bits": (
        [dense(), *ragged("ids", [2**31 - 1, 2**31 - 1, 2, 0, 0, 0], [])],
        "tensor 'ids.lengths' counts 4294967296 ids, but 'ids.values' has 0",
    ),
    "id too large": (
        [dense(), *features(item=fixed("item", 1, 7))],
        "feature 'item' has id 7, but its table has 7 rows",
    ),
    "id that would fit another feature": (
        [dense(), *ragged("ids", [1] * 6, [49, 49, 6, 6, 6, 30])],
        "feature 'tags' has id 30, but its table has 30 rows",
    ),
    "id behind features without ids": (
        [dense(), *ragged("ids", [0, 0, 0, 0, 0, 1], [30])],
        "feature 'tags' has id 30",
    ),
    "negative id": (
        [dense(), *features(tags=fixed("tags", 1, -(2**63)))],
        "feature 'tags' has id -9223372036854775808",
    ),
    "id of more than 32 bits": (
        [dense(), *features(tags=fixed("tags", 1, 2**32))],
        "feature 'tags' has id 4294967296",
    ),
    "NaN": ([dense(value=float("nan")), *features()], "tensor 'dense' has elements that are NaN"),
    "infinite": ([dense(value=-float("inf")), *features()], "'dense' has elements that are NaN or"),
}


@pytest.mark.parametrize(("tensors", "says"), CASES.values(), ids=CASES.keys())
def test_what_does_not_fit(tensors: list[Any], says: str) -> None:
    with pytest.raises(RequestError) as raised:
        read(inputs_of(), tensors)
    assert says in raised.value.text
    assert raised.value.outcome is Outcome.BAD and raised.value.retry_s is None


WEIGHTED_CASES = {
    "as many": ([1.0], "tensor 'user.weights' has not as many elements as 'user.values'"),
    "NaN": ([1.0, float("nan")], "weights of ids are NaN or infinite"),
    "infinite": ([1.0, float("inf")], "weights of ids are NaN or infinite"),
}


@pytest.mark.parametrize(("weights", "says"), WEIGHTED_CASES.values(), ids=WEIGHTED_CASES.keys())
def test_weights_that_do_not_fit(weights: list[float], says: str) -> None:
    with pytest.raises(RequestError) as raised:
        tensors = [dense(), *features(user=ragged("user", [1, 1], [1, 2], weights))]
        read(inputs_of(is_weighted=True), tensors)
    assert says in raised.value.text


HEADS = {
    "another datatype": (TensorHead("user", "BYTES", (2,)), "has datatype 'BYTES', but none takes"),
    "negative": (
        TensorHead("user", "INT64", (-2,)),
        "'user' must have sizes from 0 to 2147483647, but has shape [-2]",
    ),
    "both negative": (TensorHead("user", "INT64", (-1, -2)), "but has shape [-1, -2]"),
    "huge": (TensorHead("user", "INT64", (2, HUGE)), f"but has shape [2, {HUGE}]"),
    "huge of none": (TensorHead("user", "INT64", (0, HUGE)), f"but has shape [0, {HUGE}]"),
    "without an end": (
        TensorHead("user", "INT64", (10**4000,)),
        "tensor 'user' must have sizes from 0 to 2147483647",
    ),
}


@pytest.mark.parametrize(("head", "says"), HEADS.values(), ids=HEADS.keys())
def test_heads_that_do_not_fit(head: TensorHead, says: str) -> None:
    tensors = (head, *(each for each, _ in features(user=[])))
    with pytest.raises(RequestError) as raised:
        ModelInputs(FEATURES, 0, False, 10).layout(RequestHead(None, "", tensors))
    assert says in raised.value.text and len(raised.value.text) < 1100


def test_too_many_samples() -> None:
    ids = [0] * (MOST_SAMPLES + 1)
    tensors = [dense(len(ids)), *(fixed(each.name, *ids) for each in FEATURES)]
    with pytest.raises(RequestError, match="has 7 samples, but may have 6: send several") as raised:
        read(inputs_of(), tensors)
    assert raised.value.outcome is Outcome.TOO_LARGE


def test_all_that_is_broadcast_is_one_sample() -> None:
    tensors = [dense(1, broadcast=True)]
    tensors += [fixed(each.name, 1, broadcast=True) for each in FEATURES]
    assert read(inputs_of(), tensors).samples == 1


def test_no_samples() -> None:
    found = read(inputs_of(), [dense(0), *(fixed(each.name) for each in FEATURES)])
    assert (found.samples, found.ids) == (0, 0)
    found = read(inputs_of(), [dense(0), *ragged("ids", [], [])])
    assert (found.samples, found.counts.tolist()) == (0, [0, 0, 0])


@given(requests(least=0))
def test_layouts_count_what_is_read(asked: Asked) -> None:
    inputs = inputs_of()
    layout, found = inputs.layout(asked.head), asked.features(inputs)
    assert (layout.samples, layout.ids) == (len(asked.samples), found.ids)


@given(requests(is_weighted=True))
def test_weights_are_kept_in_the_order_of_ids(asked: Asked) -> None:
    found = asked.features(inputs_of(is_weighted=True))
    at = 0
    for key in range(len(FEATURES)):
        rows = asked.samples[:1] if found.broadcast[key] else asked.samples
        for each in rows:
            end = at + len(each.ids[key])
            assert found.values[at:end].tolist() == list(each.ids[key])
            assert found.weights[at:end].tolist() == list(each.weights[key])
            at = end
    assert at == found.ids


def test_a_model_of_one_feature() -> None:
    inputs = ModelInputs([Feature("f", 9)], 0, False, 10)
    found = read(inputs, ragged("ids", [2, 0, 1], [8, 7, 6]))
    assert (found.samples, found.counts.tolist()) == (3, [3])
    head, content = ragged("f", [2], [8, 7])
    shared = [(each._replace(broadcast=True), array) for each, array in (head, content)]
    assert read(inputs, shared).broadcast == (True,)


def test_metadata_names_what_is_taken() -> None:
    listed = {each["name"]: (each["datatype"], each["shape"]) for each in inputs_of().tensors()}
    assert listed["dense"] == ("FP32", [-1, DENSE_COLUMNS])
    assert listed["item"] == ("INT64", [-1, -1])
    assert listed["ids.lengths"] == listed["tags.lengths"] == ("INT32", [-1])
    assert "user.weights" not in listed
    assert "user.weights" in {each["name"] for each in inputs_of(is_weighted=True).tensors()}


def test_features_of_models() -> None:
    assert features_in(Bags("meta")) == (FEATURES, False)
    assert features_in(Bags("meta", is_weighted=True)) == (FEATURES, True)
    assert features_in(Rows("meta")) == (FEATURES, False)
