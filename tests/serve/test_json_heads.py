"""Requests in JSON, with tensors in it or behind it."""

import json
import time
from typing import Any

import numpy as np
import pytest

from torchrec_bls.serve.heads import TensorHead
from torchrec_bls.serve.json_heads import JsonHead
from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.waiting import Answer


def tensor(name: str, datatype: str, shape: list[int], data: Any = None, **parameters: Any) -> Any:
    made = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        made["data"] = data
    return made | ({"parameters": parameters} if parameters else {})


def body(*tensors: Any, **others: Any) -> bytes:
    return json.dumps({"inputs": tensors, **others}).encode()


def contents_of(*tensors: Any, binary: bytes = b"") -> list[Any]:
    return [each.tolist() for each in JsonHead(body(*tensors), "").contents(memoryview(binary))]


def test_a_head() -> None:
    text = body(
        tensor("a", "INT64", [1, 2], [[1, 2]], broadcast=True, other={"x": [1]}),
        tensor("b", "FP32", [3], binary_data_size=12),
        id="i",
        parameters={"timeout": 5000, "priority": 1},
    )
    head = JsonHead(text, "7").head
    assert (head.timeout_us, head.version) == (5000, "7")
    assert head.tensors == (TensorHead("a", "INT64", (1, 2), True), TensorHead("b", "FP32", (3,)))
    assert JsonHead(text, "").binary_bytes == 12


def test_tensors_in_the_json() -> None:
    assert contents_of(
        tensor("a", "INT64", [2, 2], [[1, 2], [3, -(2**63)]]),
        tensor("b", "INT64", [2, 2], [1, 2, 3, 2**63 - 1]),
        tensor("c", "FP32", [3], [1, -0.5, 1e-3]),
        tensor("d", "INT32", [0], []),
        tensor("e", "INT64", [2, 0], [[], []]),
        tensor("f", "INT64", [0, 3], []),
    ) == [
        [1, 2, 3, -(2**63)],
        [1, 2, 3, 2**63 - 1],
        [1, -0.5, float(np.float32(1e-3))],
        [],
        [],
        [],
    ]


def test_tensors_behind_the_json_lie_at_any_byte() -> None:
    floats, ids = np.array([1.5, -2], dtype="<f4"), np.array([3, -4, 2**40], dtype="<i8")
    assert contents_of(
        tensor("a", "FP32", [2], binary_data_size=8),
        tensor("b", "INT32", [1], [5]),
        tensor("c", "INT64", [3, 1], binary_data_size=24),
        tensor("d", "FP32", [0], binary_data_size=0),
        binary=floats.tobytes() + ids.tobytes(),
    ) == [[1.5, -2], [5], [3, -4, 2**40], []]


@pytest.mark.filterwarnings("error")
def test_numbers_that_float32_does_not_have_are_infinite() -> None:
    """The model's inputs refuse these."""
    assert contents_of(tensor("a", "FP32", [2], [1e39, -1e300])) == [[np.inf, -np.inf]]


CONTENTS: dict[str, tuple[Any, str]] = {
    "none": (tensor("a", "INT64", [1]), "tensor 'a' has no data"),
    "fewer": (tensor("a", "INT64", [3], [1, 2]), "'a' has data of shape [2], but its shape is [3]"),
    "more": (tensor("a", "INT64", [1], [1, 2]), "'a' has more data than its shape [1] takes"),
    "turned": (
        tensor("a", "INT64", [2, 3], [[1, 2], [3, 4], [5, 6]]),
        "tensor 'a' has data of shape [3, 2], but its shape is [2, 3]",
    ),
    "jagged": (tensor("a", "INT64", [2, 2], [[1], [2, 3, 4]]), "no INT64 of shape [2, 2]"),
    "too deep": (tensor("a", "INT64", [1, 1], [[[1]]]), "tensor 'a' has data that is no INT64"),
    "nested": (tensor("a", "INT64", [1], [[1]]), "tensor 'a' has data that is no INT64"),
    "fractions": (tensor("a", "INT64", [1], [1.5]), "Expected `int`, got `float`"),
    "truth": (tensor("a", "INT64", [1], [True]), "Expected `int`, got `bool`"),
    "text": (tensor("a", "FP32", [1], ["1"]), "Expected `float`, got `str`"),
    "nothing": (tensor("a", "FP32", [1], [None]), "Expected `float`, got `null`"),
    "no list": (tensor("a", "INT64", [1], 1), "Expected `array`, got `int`"),
    "64 bits": (tensor("a", "INT64", [1], [2**63]), "tensor 'a' has data that is no INT64"),
    "32 bits": (tensor("a", "INT32", [1], [2**31]), "tensor 'a' has data that is no INT32"),
    "digits": (tensor("a", "FP32", [1], [10**400]), "tensor 'a' has data that is no FP32"),
    "bytes": (
        tensor("a", "INT64", [2], binary_data_size=8),
        "has binary_data_size 8, but its shape [2] of INT64 takes 16",
    ),
}


@pytest.mark.parametrize(("given", "says"), CONTENTS.values(), ids=CONTENTS.keys())
def test_contents_that_do_not_fit(given: Any, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        contents_of(given, binary=bytes(given.get("parameters", {}).get("binary_data_size", 0)))
    assert says in raised.value.text
    assert raised.value.outcome is Outcome.BAD


def test_bytes_behind_the_json_that_nobody_announces() -> None:
    for size in (7, 9):
        with pytest.raises(RequestError, match=f"{size} bytes follow the JSON, but .* is 8 in all"):
            contents_of(tensor("a", "INT64", [1], binary_data_size=8), binary=bytes(size))


A = tensor("a", "INT64", [1], [1])
HEADS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "the request is no inference request in JSON"),
    "nothing": (b"", "Input data was truncated"),
    "another encoding": (b'{"inputs": [], "id": "\xff"}', "no inference request in JSON"),
    "half a character": (b'{"inputs": [], "id": "\\ud800"}', "no inference request in JSON"),
    "two": (body(A) + body(A), "trailing characters"),
    "no inputs": (b"{}", "missing required field `inputs`"),
    "no name": (b'{"inputs":[{"shape":[1],"datatype":"INT64"}]}', "missing required field `name`"),
    "NaN": (b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":[NaN]}]}', "no infere"),
    "shape": (body(tensor("a", "INT64", [1.5])), "`$.inputs[0].shape[0]`"),  # type: ignore[list-item]
    "sizes": (body(tensor("a", "INT64", [10**30])), "`$.inputs[0].shape[0]`"),
    "digits": (b'{"inputs":[{"name":"a","shape":[' + b"9" * 9999 + b"]}]}", "out of range"),
    "timeout": (body(A, parameters={"timeout": "5"}), "got `str` - at `$.parameters.timeout`"),
    "timeouts": (body(A, parameters={"timeout": 2**63}), "at `$.parameters.timeout`"),
    "truth": (body(A, parameters={"timeout": True}), "got `bool` - at `$.parameters.timeout`"),
    "broadcast": (body(tensor("a", "INT64", [1], broadcast=1)), "parameters.broadcast"),
    "size": (body(tensor("a", "INT64", [1], binary_data_size=-8)), "binary_data_size"),
    "size of text": (body(tensor("a", "INT64", [1], binary_data_size="8")), "binary_data_size"),
    "both": (
        body(tensor("a", "INT64", [1], [1], binary_data_size=8)),
        "tensor 'a' has data, and a binary_data_size as well",
    ),
    "deep": (
        b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":' + b"[" * 10**6,
        "recursion",
    ),
    "deep parameters": (b'{"parameters":{"x":' + b'{"x":' * 10**6, "recursion"),
    "many": (body(*[tensor("a", "INT64", [0])] * 4097), "length <= 4096"),
}


@pytest.mark.parametrize(("text", "says"), HEADS.values(), ids=HEADS.keys())
def test_heads_that_do_not_fit(text: bytes, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        JsonHead(text, "")
    assert says in raised.value.text
    assert raised.value.outcome is Outcome.BAD


def test_of_names_that_are_there_twice_the_last_one_counts() -> None:
    """For the head and for the contents: what was admitted is what is read."""
    text = (
        b'{"inputs":[{"name":"a","shape":[9],"shape":[2],"datatype":"FP32","datatype":"INT64",'
        b'"data":[9],"data":[1,2]}]}'
    )
    request = JsonHead(text, "")
    assert request.head.tensors == (TensorHead("a", "INT64", (2,)),)
    assert request.contents(memoryview(b""))[0].tolist() == [1, 2]


def test_what_the_head_does_not_promise_is_not_decoded() -> None:
    text = body(tensor("a", "INT64", [1], [])).replace(b"[]", b"[" + b"1," * (4 << 20) + b"1]")
    request = JsonHead(text, "")
    began = time.process_time()
    with pytest.raises(RequestError, match="more data than its shape"):
        request.contents(memoryview(b""))
    assert time.process_time() - began < 1


ANSWER = Answer(
    {"scores": np.array([[1.5], [2]], dtype=np.float32), "other": np.array([3, 4], np.float32)},
    "7",
    5,
    0.25,
)


def reply_to(**asked: Any) -> tuple[Any, bytes]:
    text, size = JsonHead(body(A, **asked), "").reply(ANSWER, "m")
    return json.loads(text[:size]), b"" if size is None else text[size:]


def test_a_reply() -> None:
    reply, rest = reply_to(id="i")
    assert not rest
    assert reply == {
        "model_name": "m",
        "model_version": "7",
        "id": "i",
        "parameters": {"generation": "7", "batch": 5, "queue_us": 250000},
        "outputs": [
            {"name": "scores", "datatype": "FP32", "shape": [2, 1], "data": [1.5, 2]},
            {"name": "other", "datatype": "FP32", "shape": [2], "data": [3, 4]},
        ],
    }


def test_replies_in_binary() -> None:
    reply, rest = reply_to(parameters={"binary_data_output": True})
    assert [each["parameters"]["binary_data_size"] for each in reply["outputs"]] == [8, 8]
    assert np.frombuffer(rest, "<f4").tolist() == [1.5, 2, 3, 4]
    asked = [{"name": "other", "parameters": {"binary_data": True}}, {"name": "scores"}]
    reply, rest = reply_to(outputs=asked)
    assert [each["name"] for each in reply["outputs"]] == ["other", "scores"]
    assert reply["outputs"][1]["data"] == [1.5, 2] and np.frombuffer(rest, "<f4")[0] == 3
    asked[0]["parameters"] = {"binary_data": False}
    reply, rest = reply_to(outputs=asked[:1], parameters={"binary_data_output": True})
    assert [each["name"] for each in reply["outputs"]] == ["other"] and not rest


def test_long_texts_are_shortened() -> None:
    """gRPC sends them as a header, which has a limit."""
    error = RequestError(Outcome.BAD, "x" * 10**6)
    assert len(error.text) == len(str(error)) == 1003
