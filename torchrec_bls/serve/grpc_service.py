"""The service over gRPC: the Open Inference Protocol v2, by the messages of tritonclient.

Of an inference request, the head is read first, and its raw tensors only if it can be answered in
time.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages

from torchrec_bls.serve.desk import AT_FRONT, Desk
from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.inputs import DTYPES
from torchrec_bls.serve.json_heads import reply_parameters
from torchrec_bls.serve.outcomes import RequestError, bad
from torchrec_bls.serve.raw_contents import split
from torchrec_bls.serve.serving_facts import ServingFacts
from torchrec_bls.serve.waiting import Answer

_SERVICE = "inference.GRPCInferenceService"
# Bytes of a message beside the tensors.
_HEAD_BYTES = 1 << 20
# Calls that are under way at most. The whole message of a call is in memory before this code sees
# it, and more calls than can wait for a batch would be refused anyway.
_MOST_CALLS = 2048
# Dimensions of a tensor whose shape is read: no tensor has more than two.
_MOST_DIMENSIONS = 8
# Field of InferTensorContents for each datatype.
_TYPED = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}
_Method = Callable[[bytes, Any], Awaitable[bytes]]


class GrpcService:
    """Answers gRPC requests.

    Args:
        desk: where inference requests come in.
        facts: what else callers may ask.
    """

    def __init__(self, desk: Desk, facts: ServingFacts) -> None:
        self._desk = desk
        self._facts = facts

    def server(self, address: str) -> Any:
        """Returns a server that is not started. Other processes may listen at the same port.

        Args:
            address: host and port that it listens at, or "unix:" and a path.

        Raises:
            OSError: the port is taken.
        """
        size = self._desk.engine.contract.max_body_bytes + _HEAD_BYTES
        options = [("grpc.max_receive_message_length", size), ("grpc.so_reuseport", 1)]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_CALLS)
        methods: dict[str, _Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {address} for gRPC: {error}") from error
        return server

    async def _infer(self, message: bytes, context: Any) -> bytes:
        try:
            arrived = self._desk.engine.arrivals.earliest()
            with self._desk.request("grpc", arrived, self._at_front(context)) as ticket:
                text, raw = split(message)
                request = _parsed(messages.ModelInferRequest, text)
                self._facts.check_name(request.model_name)
                self._facts.check_outputs(each.name for each in request.outputs)
                ticket.admit(_head(request, context.time_remaining()))
                answer = await ticket.answer(_contents(request, raw))
                return _reply(request, answer, self._facts.name)
        except RequestError as error:
            await _abort(context, error)
        raise AssertionError("abort raises")

    def _at_front(self, context: Any) -> str:
        if not self._desk.has_front:
            return ""
        return next(
            (str(value) for key, value in context.invocation_metadata() if key == AT_FRONT), ""
        )

    async def _live(self, message: bytes, context: Any) -> bytes:
        return _bytes(messages.ServerLiveResponse(live=True))

    async def _ready(self, message: bytes, context: Any) -> bytes:
        return _bytes(messages.ServerReadyResponse(ready=not self._facts.why_not_ready()))

    async def _model_ready(self, message: bytes, context: Any) -> bytes:
        try:
            request = _parsed(messages.ModelReadyRequest, message)
        except RequestError as error:
            await _abort(context, error)
        is_ready = request.name == self._facts.name and not self._facts.why_not_ready()
        return _bytes(messages.ModelReadyResponse(ready=is_ready))

    async def _server_metadata(self, message: bytes, context: Any) -> bytes:
        return _bytes(messages.ServerMetadataResponse(**self._facts.server_metadata()))

    async def _model_metadata(self, message: bytes, context: Any) -> bytes:
        try:
            self._facts.check_name(_parsed(messages.ModelMetadataRequest, message).name)
        except RequestError as error:
            await _abort(context, error)
        return _bytes(messages.ModelMetadataResponse(**self._facts.model_metadata()))


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise bad(f"the message is no {kind.DESCRIPTOR.name}: {error}") from error


def _bytes(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


def _head(request: Any, remaining_s: float | None) -> RequestHead:
    """Returns the head of a request. The deadline of the call counts as well, if it is earlier."""
    timeout_us = None
    if "timeout" in request.parameters:
        given = request.parameters["timeout"]
        if given.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
            raise bad("parameter 'timeout' of the request must be an integer")
        timeout_us = given.int64_param or given.uint64_param
    if remaining_s is not None and math.isfinite(remaining_s):
        remaining_us = int(remaining_s * 1e6)
        timeout_us = remaining_us if timeout_us is None else min(timeout_us, remaining_us)
    tensors = []
    for each in request.inputs:
        broadcast = False
        if "broadcast" in each.parameters:
            given = each.parameters["broadcast"]
            if given.WhichOneof("parameter_choice") != "bool_param":
                raise bad(f"parameter 'broadcast' of tensor '{each.name}' must be a boolean")
            broadcast = given.bool_param
        if len(each.shape) > _MOST_DIMENSIONS:
            raise bad(f"tensor '{each.name}' has {len(each.shape)} dimensions")
        tensors.append(TensorHead(each.name, each.datatype, tuple(each.shape), broadcast))
    return RequestHead(timeout_us, request.model_version, tuple(tensors))


def _contents(request: Any, raw: list[memoryview]) -> list[NDArray[Any]]:
    if raw and len(raw) != len(request.inputs):
        raise bad(f"{len(raw)} raw contents for {len(request.inputs)} tensors")
    arrays: list[NDArray[Any]] = []
    for number, tensor in enumerate(request.inputs):
        dtype = DTYPES[tensor.datatype]
        count = math.prod(tensor.shape)
        if raw:
            size = len(raw[number])
            if size != count * dtype.itemsize:
                raise bad(
                    f"tensor '{tensor.name}' has {size} raw bytes, but its shape "
                    f"{list(tensor.shape)} of {tensor.datatype} takes {count * dtype.itemsize}"
                )
            arrays.append(np.frombuffer(raw[number], dtype=dtype))
            continue
        typed = getattr(tensor.contents, _TYPED[tensor.datatype])
        if len(typed) != count:
            raise bad(
                f"tensor '{tensor.name}' has {len(typed)} elements in "
                f"{_TYPED[tensor.datatype]}, but its shape {list(tensor.shape)} has {count}"
            )
        arrays.append(np.array(typed, dtype=dtype))
    return arrays


def _reply(request: Any, answer: Answer, model: str) -> bytes:
    reply = messages.ModelInferResponse(
        model_name=model, model_version=answer.version, id=request.id
    )
    for name, value in reply_parameters(answer).items():
        if isinstance(value, str):
            reply.parameters[name].string_param = value
        else:
            reply.parameters[name].int64_param = value
    for name in dict.fromkeys(each.name for each in request.outputs) or answer.outputs:
        values = answer.outputs[name]
        reply.outputs.add(name=name, datatype="FP32", shape=values.shape)
        reply.raw_output_contents.append(values.tobytes())
    return _bytes(reply)


async def _abort(context: Any, error: RequestError) -> None:
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(math.ceil(error.retry_s * 1e3))),)
    code = getattr(grpc.StatusCode, error.outcome.code)
    await context.abort(code, error.text, metadata)
