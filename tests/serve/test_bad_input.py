"""What a caller does wrong is the caller's alone: the right status, a text that names it, and right
scores for others."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from tests.serve.asking import (
    WAYS,
    Refused,
    Tensor,
    binary_of,
    by_json,
    drawn,
    json_of,
    message_of,
    sent_as_json,
    sent_by_grpc,
)
from tests.serve.running import Running

pytestmark = pytest.mark.full

CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 413: "INVALID_ARGUMENT", 500: "INTERNAL"}
CODES[503] = "RESOURCE_EXHAUSTED"
GOOD = drawn(3, 1, weighted=True)
FIXED = drawn(3, 2, count=2)
Tensors = Sequence[Tensor]


def but(tensors: Tensors, name: str, values: Any, dtype: Any = None, **more: Any) -> list[Tensor]:
    """Returns tensors of which one has other values."""
    assert name in [each.name for each in tensors]
    return [
        replace(each, values=np.array(values, dtype or each.values.dtype), **more)
        if each.name == name
        else each
        for each in tensors
    ]


def set_at(tensors: Tensors, name: str, value: Any, at: int = 0) -> list[Tensor]:
    """Returns tensors of which one has another element."""
    [values] = [each.values.copy() for each in tensors if each.name == name]
    values.reshape(-1)[at] = value
    return but(tensors, name, values)


RAGGED, AT_ONCE, DENSE = GOOD.ragged(), GOOD.at_once(), GOOD.dense_tensor
# What is sent, the status over HTTP, and words of the text.
ROWS: dict[str, tuple[Tensors, int, list[str]]] = {
    "an unknown tensor": ([*RAGGED, Tensor("age", np.zeros(3, np.int64))], 400, ["'age'"]),
    "a tensor is missing": (RAGGED[1:], 400, ["'dense'"]),
    "a feature is missing": (RAGGED[:-3], 400, ["'category'"]),
    "lengths are missing": ([*RAGGED[:2], *RAGGED[3:]], 400, ["'user.lengths'"]),
    "a tensor twice": ([*RAGGED, DENSE], 400, ["'dense'", "twice"]),
    "another datatype": (
        but(RAGGED, "dense", DENSE.values, np.int64),
        400,
        ["'dense'", "INT64", "FP32"],
    ),
    "lengths of another datatype": (
        but(RAGGED, "user.lengths", RAGGED[2].values, np.int64),
        400,
        ["'user.lengths'", "INT32"],
    ),
    "too few columns": (but(RAGGED, "dense", DENSE.values[:, 1:]), 400, ["'dense'", "3"]),
    "another number of samples": (but(RAGGED, "dense", DENSE.values[1:]), 400, ["user.lengths"]),
    "three dimensions": (
        but(FIXED.fixed(), "item", np.zeros((3, 1, 1), np.int64)),
        400,
        ["'item'", "3"],
    ),
    "lengths of more ids": (
        set_at(RAGGED, "item.lengths", 99),
        400,
        ["'item.lengths'", "'item.values'"],
    ),
    "a negative length": (set_at(RAGGED, "item.lengths", -1), 400, ["'item.lengths'", "negative"]),
    "lengths of all for no whole sample": (
        but(AT_ONCE, "ids.lengths", [1, 1, 1, 1]),
        400,
        ["'ids.lengths'"],
    ),
    "an id above the table": (
        set_at(FIXED.fixed(), "category", 7, 3),
        400,
        ["'category'", "id 7", "7 rows"],
    ),
    "a negative id": (set_at(FIXED.fixed(), "user", -1), 400, ["'user'", "id -1"]),
    "an id above a table of all": (
        set_at(AT_ONCE, "ids.values", 2**40, -1),
        400,
        ["'category'", str(2**40)],
    ),
    "too few weights": (but(RAGGED, "user.weights", [1.0]), 400, ["'user.weights'"]),
    "two samples for all": (
        but(FIXED.fixed(), "user", [[1], [2]], broadcast=True),
        400,
        ["'user'", "broadcast"],
    ),
    "too many samples": (drawn(65, 3).ragged(), 413, ["65", "64"]),
    "scores that are no numbers": (set_at(RAGGED, "dense", 3e38), 500, ["v1@", "infinite"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS)
def test_tensors(service: Running, row: str, way: str):
    tensors, status, words = ROWS[row]
    error = refused_beside_others(service, lambda: WAYS[way](service, tensors))
    assert error.status == (CODES[status] if "grpc" in way else status)
    for word in words:
        assert word in error.text


def refused_beside_others(service: Running, ask: Callable[[], object]) -> Refused:
    """Returns how a request is refused, while others get their scores."""
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(by_json, service, GOOD.ragged()) for _ in range(2)]
        with pytest.raises(Refused) as caught:
            pool.submit(ask).result()
        for each in others:
            np.testing.assert_allclose(
                each.result().outputs["click"], GOOD.scores()["click"], rtol=1e-5, atol=1e-6
            )
    return caught.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["binary", "grpc"])
def test_features_that_are_no_numbers(service: Running, way: str, value: float):
    for name in ("dense", "user.weights"):
        error = refused_beside_others(
            service, lambda name=name: WAYS[way](service, set_at(RAGGED, name, value))
        )
        assert error.status in (400, "INVALID_ARGUMENT")
        assert "NaN or infinite" in error.text


@pytest.mark.parametrize("timeout", [0, -5, 1, -(2**62)])
@pytest.mark.parametrize("way", WAYS)
def test_timeouts_below_the_fastest_batch_are_refused_unrun(
    service: Running, way: str, timeout: int
):
    refused = service.count("refused")
    batches = service.metric("torchrec_bls_batch_samples_count")
    with pytest.raises(Refused) as caught:
        WAYS[way](service, RAGGED, parameters={"timeout": timeout})
    assert caught.value.status in (503, "RESOURCE_EXHAUSTED")
    assert "late" in caught.value.text
    assert service.count("refused") == refused + 1
    assert service.metric("torchrec_bls_batch_samples_count") == batches


def test_a_call_whose_deadline_is_below_the_fastest_batch(service: Running):
    batches = service.metric("torchrec_bls_batch_samples_count")
    with pytest.raises(Refused) as caught:
        sent_by_grpc(service, message_of(service.name, RAGGED, typed=False), timeout=1e-4)
    # The caller's own library may be the first to give up.
    assert caught.value.status in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
    assert service.metric("torchrec_bls_batch_samples_count") == batches


@pytest.mark.parametrize("way", WAYS)
def test_outputs_that_the_model_has_not(service: Running, way: str):
    batches = service.metric("torchrec_bls_batch_samples_count")
    with pytest.raises(Refused, match=r"no output 'buy', but \['click'") as caught:
        WAYS[way](service, RAGGED, outputs=[{"name": "click"}, {"name": "buy"}])
    assert caught.value.status in (400, "INVALID_ARGUMENT")
    assert service.metric("torchrec_bls_batch_samples_count") == batches  # before the model runs


def changed(tensor: int, **more: Any) -> dict[str, Any]:
    """Returns a request in JSON of which a tensor is changed."""
    request = json_of(FIXED.fixed())
    request["inputs"][tensor].update(more)
    return request


JSON_ROWS: dict[str, tuple[Mapping[str, Any], str]] = {
    "no inputs": ({"id": "a"}, "inputs"),
    "inputs that are no list": ({"inputs": {}}, "inputs"),
    "a timeout that is no integer": (json_of(RAGGED, parameters={"timeout": "1"}), "timeout"),
    "a timeout that is a flag": (json_of(RAGGED, parameters={"timeout": True}), "timeout"),
    "a timeout of 400 digits": (json_of(RAGGED, parameters={"timeout": 10**400}), "timeout"),
    "a dimension of 400 digits": (changed(1, shape=[3, 10**400]), "inputs[1].shape"),
    "a negative dimension": (changed(1, shape=[-3, -2]), "'user'"),
    "no dimensions": (changed(1, shape=[]), "'user'"),
    "an unknown datatype": (changed(1, datatype="BYTES"), "'user'"),
    "a shape of more elements": (changed(1, shape=[3, 3]), "'user'"),
    "ids that are no integers": (changed(1, data=[1.5] * 6), "'user'"),
    "ids that are flags": (changed(1, data=[True] * 6), "'user'"),
    "ids that are text": (changed(1, data=["1"] * 6), "'user'"),
    "ids above 64 bits": (changed(1, data=[2**64] * 6), "'user'"),
    "rows of different lengths": (changed(1, data=[[1, 2, 3], [1], [1, 2]]), "'user'"),
    "no data": (changed(1, data=None), "'user'"),
    "a flag that is none": (
        changed(1, parameters={"broadcast": 1}),
        "inputs[1].parameters.broadcast",
    ),
    "binary tensors without a header": (
        {"inputs": [{**each.head, "parameters": {"binary_data_size": 8}} for each in RAGGED]},
        "binary_data_size",
    ),
    "numbers above float32": (changed(0, data=[1e39] * 9), "'dense'"),
}


@pytest.mark.parametrize("row", JSON_ROWS)
def test_json(service: Running, row: str):
    request, words = JSON_ROWS[row]
    error = refused_beside_others(service, lambda: sent_as_json(service, request))
    assert error.status == 400
    assert words in error.text


BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "no UTF-8": b"\xff\xfe{}",
    "null": b"null",
    "half a request": json.dumps(json_of(RAGGED)).encode()[:-9],
    "two requests": json.dumps(json_of(RAGGED)).encode() * 2,
    "NaN": json.dumps(changed(0, data=[float("nan")] * 9)).encode(),
    "half a surrogate": json.dumps(changed(0, name="\ud800")).encode(),
    "deep lists": b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":'
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}]}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_bodies_that_are_no_request(service: Running, body: bytes):
    status, _, reply = service.request("POST", service.infer_path, body)
    assert status == 400
    assert "JSON" in json.loads(reply)["error"]


def head_size(size: object) -> dict[str, str]:
    return {"Inference-Header-Content-Length": str(size)}


BINARY, SIZE = binary_of(RAGGED)
HEAD = int(SIZE["Inference-Header-Content-Length"])
BINARY_ROWS: dict[str, tuple[bytes, Mapping[str, str]]] = {
    "a byte too few": (BINARY[:-1], SIZE),
    "a byte too many": (BINARY + b"x", SIZE),
    "no tensors": (BINARY[:HEAD], SIZE),
    "a head above the body": (BINARY, head_size(len(BINARY) + 1)),
    "a head of a byte too few": (BINARY, head_size(HEAD - 1)),
    "no head": (BINARY, head_size(0)),
    "a sign": (BINARY, head_size(f"+{HEAD}")),
    "a negative size": (BINARY, head_size(-HEAD)),
    "no number": (BINARY, head_size("1e3")),
    "a size of 30 digits": (BINARY, head_size("9" * 30)),
    "an empty size": (BINARY, head_size("")),
}


@pytest.mark.parametrize("row", BINARY_ROWS)
def test_binary_bodies(service: Running, row: str):
    body, headers = BINARY_ROWS[row]
    status, _, reply = service.request("POST", service.infer_path, body, headers)
    assert status == 400
    assert json.loads(reply)["error"]


@pytest.mark.parametrize("size", [-1, 4, 2**63, "36", 36.0])
def test_sizes_of_binary_tensors(service: Running, size: object):
    inputs = [
        {**each.head, "parameters": {"binary_data_size": each.values.nbytes}} for each in RAGGED
    ]
    inputs[0]["parameters"]["binary_data_size"] = size
    text = json.dumps({"inputs": inputs}).encode()
    body = text + BINARY[HEAD:]
    status, _, reply = service.request("POST", service.infer_path, body, head_size(len(text)))
    assert status == 400
    assert "binary_data_size" in json.loads(reply)["error"]


@pytest.mark.parametrize("data", [None, []])
def test_a_binary_tensor_whose_data_is_empty(service: Running, data: object):
    """KServe's client writes it so."""
    inputs = [
        {**each.head, "data": data, "parameters": {"binary_data_size": each.values.nbytes}}
        for each in RAGGED
    ]
    text = json.dumps({"inputs": inputs}).encode()
    body = text + BINARY[HEAD:]
    assert service.request("POST", service.infer_path, body, head_size(len(text)))[0] == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_compressed_bodies(service: Running, encoding: str):
    headers = {"Content-Encoding": encoding}
    status, _, reply = service.request("POST", service.infer_path, b"...", headers)
    assert status == 400
    assert "Content-Encoding" in json.loads(reply)["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/other/infer",
        "/v2/models/ranker/versions/7/infer",
        "/v2/models//infer",
    ],
)
def test_what_is_not_served(service: Running, path: str):
    status, reply = service.infer(json_of(RAGGED), path)
    assert status == 404
    assert reply["error"]


@pytest.mark.parametrize("field", ["model_name", "model_version"])
def test_what_is_not_served_over_grpc(service: Running, field: str):
    message = message_of(service.name, RAGGED, typed=False)
    setattr(message, field, "other")
    with pytest.raises(Refused, match="'other'") as caught:
        sent_by_grpc(service, message)
    assert caught.value.status == "NOT_FOUND"


def of_grpc(change: Callable[[Any], object], *, typed: bool = False) -> Any:
    message = message_of("ranker", FIXED.fixed(), typed=typed)
    change(message)
    return message


GRPC_ROWS: dict[str, tuple[Any, str]] = {
    "a raw content too few": (of_grpc(lambda m: m.raw_input_contents.pop()), "3 raw contents"),
    "a raw content too many": (
        of_grpc(lambda m: m.raw_input_contents.append(b"")),
        "5 raw contents",
    ),
    "raw bytes too few": (
        of_grpc(lambda m: m.raw_input_contents.__setitem__(1, b"1234567")),
        "'user'",
    ),
    "contents in the field of another datatype": (
        of_grpc(lambda m: m.inputs[1].contents.ClearField("int64_contents"), typed=True),
        "'user'",
    ),
    "a timeout that is text": (
        of_grpc(lambda m: setattr(m.parameters["timeout"], "string_param", "1")),
        "timeout",
    ),
    "a flag that is none": (
        of_grpc(lambda m: setattr(m.inputs[1].parameters["broadcast"], "int64_param", 1)),
        "'user'",
    ),
    "a negative dimension": (
        of_grpc(lambda m: m.inputs[1].shape.__setitem__(0, -3)),
        "'user'",
    ),
    "a shape of many sizes": (
        of_grpc(lambda m: m.inputs[1].shape.extend([1] * 100_000)),
        "100002 dimensions",
    ),
    "an unknown datatype": (of_grpc(lambda m: setattr(m.inputs[1], "datatype", "BYTES")), "'user'"),
    # More than gRPC's callers would take as the text of an error.
    "a name of 100,000 letters": (
        of_grpc(lambda m: setattr(m.inputs[1], "datatype", "é" * 100_000)),
        "'user'",
    ),
}


@pytest.mark.parametrize("row", GRPC_ROWS)
def test_grpc_messages(service: Running, row: str):
    message, words = GRPC_ROWS[row]
    error = refused_beside_others(service, lambda: sent_by_grpc(service, message))
    assert error.status == "INVALID_ARGUMENT"
    assert words in error.text


@pytest.mark.parametrize("body", [b"\xff" * 10, b"\x3a\x05ab", b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message(service: Running, body: bytes):
    with grpc.insecure_channel(service.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(body, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_above_the_limit(service: Running):
    message = messages.ModelInferRequest(raw_input_contents=[bytes(3 << 20)])
    error = refused_beside_others(service, lambda: sent_by_grpc(service, message))
    assert error.status == "RESOURCE_EXHAUSTED"
    assert "larger than max" in error.text


def test_callers_mistakes_write_no_line(service: Running):
    before = service.log
    for ask in (WAYS["json"], WAYS["grpc"]):
        with pytest.raises(Refused):
            ask(service, ROWS["a negative id"][0])
    with service.connect() as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert service.log == before
