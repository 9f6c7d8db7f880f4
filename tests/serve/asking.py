"""Requests in all forms in which callers may send them, and the answers to them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from tests.serve import ranker
from tests.serve.running import PATIENCE, Running

DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}
_TYPED = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request."""

    name: str
    values: NDArray[Any]
    broadcast: bool = False

    @property
    def head(self) -> dict[str, Any]:
        head = {
            "name": self.name,
            "shape": list(self.values.shape),
            "datatype": DATATYPES[self.values.dtype.name],
        }
        return {**head, "parameters": {"broadcast": True}} if self.broadcast else head


@dataclass(frozen=True)
class Answered:
    """An answer: each output by name, and what else it says."""

    outputs: Mapping[str, NDArray[np.float32]]
    id: str
    model: str
    version: str
    parameters: Mapping[str, Any]


class Refused(Exception):
    """A request that got no scores: its status, or code, and the text."""

    def __init__(self, status: object, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


Ask = Callable[..., Answered]


def json_of(tensors: Sequence[Tensor], **more: Any) -> dict[str, Any]:
    """Returns a request whose tensors are in its JSON."""
    return {
        "inputs": [{**each.head, "data": each.values.reshape(-1).tolist()} for each in tensors],
        **more,
    }


def binary_of(tensors: Sequence[Tensor], **more: Any) -> tuple[bytes, dict[str, str]]:
    """Returns body and headers of a request whose tensors follow its JSON."""
    inputs = []
    for each in tensors:
        head = each.head
        size = {"binary_data_size": each.values.nbytes}
        inputs.append({**head, "parameters": {**head.get("parameters", {}), **size}})
    text = json.dumps({"inputs": inputs, **more}).encode()
    body = text + b"".join(each.values.tobytes() for each in tensors)
    return body, {"Inference-Header-Content-Length": str(len(text))}


def message_of(model: str, tensors: Sequence[Tensor], *, typed: bool, **more: Any) -> Any:
    """Returns a request for gRPC."""
    request = messages.ModelInferRequest(model_name=model, id=more.get("id", ""))
    for each in tensors:
        head = each.head
        tensor = request.inputs.add(**{**head, "parameters": {}})
        if each.broadcast:
            tensor.parameters["broadcast"].bool_param = True
        if typed:
            field = getattr(tensor.contents, _TYPED[head["datatype"]])
            field.extend(each.values.reshape(-1).tolist())
        else:
            request.raw_input_contents.append(each.values.tobytes())
    for output in more.get("outputs", ()):
        request.outputs.add(name=output["name"])
    for name, value in more.get("parameters", {}).items():
        request.parameters[name].int64_param = value
    return request


def by_json(service: Running, tensors: Sequence[Tensor], **more: Any) -> Answered:
    return sent_as_json(service, json_of(tensors, **more))


def sent_as_json(service: Running, request: Mapping[str, Any]) -> Answered:
    status, reply = service.infer(request)
    if status != 200:
        raise Refused(status, reply["error"])
    return _answered(reply, {each["name"]: each["data"] for each in reply["outputs"]})


def by_binary(service: Running, tensors: Sequence[Tensor], **more: Any) -> Answered:
    more["parameters"] = {**more.get("parameters", {}), "binary_data_output": True}
    body, headers = binary_of(tensors, **more)
    status, reply_headers, reply = service.request("POST", service.infer_path, body, headers)
    if status != 200:
        raise Refused(status, json.loads(reply)["error"])
    end = int(reply_headers["inference-header-content-length"])
    head, blocks = json.loads(reply[:end]), {}
    for each in head["outputs"]:
        size = each["parameters"]["binary_data_size"]
        blocks[each["name"]] = np.frombuffer(reply[end : end + size], "<f4")
        end += size
    assert end == len(reply)
    return _answered(head, blocks)


def by_grpc(service: Running, tensors: Sequence[Tensor], **more: Any) -> Answered:
    return sent_by_grpc(service, message_of(service.name, tensors, typed=False, **more))


def by_typed_grpc(service: Running, tensors: Sequence[Tensor], **more: Any) -> Answered:
    return sent_by_grpc(service, message_of(service.name, tensors, typed=True, **more))


def sent_by_grpc(service: Running, request: Any, timeout: float = PATIENCE) -> Answered:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            reply = stub.ModelInfer(request, timeout=timeout)
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details()) from error
    outputs = {}
    for each, raw in zip(reply.outputs, reply.raw_output_contents, strict=True):
        assert each.datatype == "FP32"
        outputs[each.name] = np.frombuffer(raw, "<f4").reshape(list(each.shape))
    parameters = {
        name: getattr(each, each.WhichOneof("parameter_choice"))
        for name, each in reply.parameters.items()
    }
    return Answered(outputs, reply.id, reply.model_name, reply.model_version, parameters)


WAYS: dict[str, Ask] = {
    "json": by_json,
    "binary": by_binary,
    "grpc": by_grpc,
    "typed grpc": by_typed_grpc,
}


@dataclass(frozen=True)
class Case:
    """What is asked: dense features and weighted ids of each sample, under each feature."""

    dense: list[list[float]]
    ids: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None = None

    @property
    def samples(self) -> int:
        return len(self.dense)

    def scores(self, version: int = 1) -> dict[str, NDArray[np.float32]]:
        outputs = ranker.expected(version, self.dense, self.ids, self.weights)
        return {name: each.numpy() for name, each in outputs.items()}

    @property
    def dense_tensor(self) -> Tensor:
        return Tensor("dense", np.array(self.dense, np.float32).reshape(-1, ranker.DENSE))

    def ragged(self) -> list[Tensor]:
        """Returns ids, their numbers and weights, feature by feature."""
        tensors = [self.dense_tensor]
        for name, bags in self.ids.items():
            tensors.append(Tensor(f"{name}.values", _flat(bags, np.int64)))
            tensors.append(Tensor(f"{name}.lengths", _lengths(bags)))
            if self.weights is not None:
                tensors.append(Tensor(f"{name}.weights", _flat(self.weights[name], np.float32)))
        return tensors

    def at_once(self) -> list[Tensor]:
        """Returns ids, their numbers and weights of all features."""
        bags = [bag for name in ranker.FEATURES for bag in self.ids[name]]
        tensors = [
            self.dense_tensor,
            Tensor("ids.values", _flat(bags, np.int64)),
            Tensor("ids.lengths", _lengths(bags)),
        ]
        if self.weights is not None:
            of_bags = [bag for name in ranker.FEATURES for bag in self.weights[name]]
            tensors.append(Tensor("ids.weights", _flat(of_bags, np.float32)))
        return tensors

    def fixed(self) -> list[Tensor]:
        """Returns as many ids of each feature for all samples."""
        return [
            self.dense_tensor,
            *(Tensor(name, np.array(bags, np.int64)) for name, bags in self.ids.items()),
        ]


def drawn(samples: int, seed: int, *, weighted: bool = False, count: int | None = None) -> Case:
    """Returns a case at random, with `count` ids each, or 0 to 3."""
    random = np.random.default_rng(seed)
    ids: dict[str, list[list[int]]] = {}
    for name, rows in ranker.ROWS.items():
        counts = [int(random.integers(4)) if count is None else count for _ in range(samples)]
        ids[name] = [random.integers(rows, size=each).tolist() for each in counts]
    case = Case(random.normal(size=(samples, ranker.DENSE)).tolist(), ids)
    if not weighted:
        return case
    weights = {name: [random.random(len(bag)).tolist() for bag in ids[name]] for name in ids}
    return replace(case, weights=weights)


def _answered(reply: Mapping[str, Any], data: Mapping[str, Any]) -> Answered:
    outputs = {}
    for each in reply["outputs"]:
        assert each["datatype"] == "FP32"
        outputs[each["name"]] = np.array(data[each["name"]], np.float32).reshape(each["shape"])
    return Answered(
        outputs,
        reply.get("id", ""),
        reply["model_name"],
        reply["model_version"],
        reply["parameters"],
    )


def _flat(bags: Sequence[Sequence[float]], dtype: Any) -> NDArray[Any]:
    return np.array([each for bag in bags for each in bag], dtype)


def _lengths(bags: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.array([len(bag) for bag in bags], np.int32)
