"""The calls of `clients`, by an interpreter that has these clients and no torch."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import kserve
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig
from numpy.typing import NDArray

_DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
_OUTPUTS = ("click", "topics")
Outputs = Mapping[str, NDArray[np.float32]]
# Function that asks with the tensors of a case.
Ask = Callable[[Sequence[Any]], Awaitable[Outputs]]


def array_of(tensor: Mapping[str, Any]) -> NDArray[Any]:
    return np.array(tensor["data"], _DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


def triton_inputs(module: Any, tensors: Sequence[Any], **how: Any) -> list[Any]:
    inputs = []
    for each in tensors:
        tensor = module.InferInput(each["name"], each["shape"], each["datatype"])
        tensor.set_data_from_numpy(array_of(each), **how)
        inputs.append(tensor)
    return inputs


def by_name(result: Any) -> Outputs:
    return {name: result.as_numpy(name) for name in _OUTPUTS}


def triton_http(place: str, model: str, *, binary: bool) -> Ask:
    client = tritonclient.http.InferenceServerClient(place, network_timeout=60)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    assert client.get_model_metadata(model)["name"] == model
    assert client.get_server_metadata()["name"] == "torchrec-bls"

    async def ask(tensors: Sequence[Any]) -> Outputs:
        wanted = [
            tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in _OUTPUTS
        ]
        inputs = triton_inputs(tritonclient.http, tensors, binary_data=binary)
        return by_name(
            client.infer(model, inputs, outputs=wanted, request_id="1", timeout=50_000_000)
        )

    return ask


def triton_grpc(place: str, model: str) -> Ask:
    client = tritonclient.grpc.InferenceServerClient(place)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    assert client.get_model_metadata(model).name == model

    async def ask(tensors: Sequence[Any]) -> Outputs:
        inputs = triton_inputs(tritonclient.grpc, tensors)
        return by_name(client.infer(model, inputs, client_timeout=60, timeout=50_000_000))

    return ask


def triton_http_aio(place: str, model: str) -> Ask:
    client = tritonclient.http.aio.InferenceServerClient(place)

    async def ask(tensors: Sequence[Any]) -> Outputs:
        return by_name(await client.infer(model, triton_inputs(tritonclient.http, tensors)))

    return ask


def triton_grpc_aio(place: str, model: str) -> Ask:
    client = tritonclient.grpc.aio.InferenceServerClient(place)

    async def ask(tensors: Sequence[Any]) -> Outputs:
        return by_name(await client.infer(model, triton_inputs(tritonclient.grpc, tensors)))

    return ask


def kserve_request(model: str, tensors: Sequence[Any], *, binary: bool) -> Any:
    inputs = []
    for each in tensors:
        tensor = kserve.InferInput(each["name"], each["shape"], each["datatype"])
        tensor.set_data_from_numpy(array_of(each), binary_data=binary)
        inputs.append(tensor)
    return kserve.InferRequest(model_name=model, infer_inputs=inputs)


def kserve_outputs(reply: Any) -> Outputs:
    return {each.name: each.as_numpy().reshape(each.shape) for each in reply.outputs}


def kserve_rest(place: str, model: str, *, binary: bool) -> Ask:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    url = f"http://{place}"

    async def ask(tensors: Sequence[Any]) -> Outputs:
        assert await client.is_server_live(url) and await client.is_server_ready(url)
        assert await client.is_model_ready(url, model)
        request = kserve_request(model, tensors, binary=binary)
        return kserve_outputs(await client.infer(url, request, model_name=model))

    return ask


def kserve_grpc(place: str, model: str) -> Ask:
    client = InferenceGRPCClient(url=place, timeout=60)

    async def ask(tensors: Sequence[Any]) -> Outputs:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready(model)
        return kserve_outputs(await client.infer(kserve_request(model, tensors, binary=True)))

    return ask


async def right_answers(ask: Ask, cases: Sequence[Any]) -> tuple[int, str]:
    """Returns how many answers are right, and what was wrong with the last one of the others."""
    right, problem = 0, ""
    for case in cases:
        try:
            outputs = await ask(case["tensors"])
            for name, values in case["scores"].items():
                np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=1e-4)
            right += 1
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return right, problem


async def main() -> int:
    said = json.load(sys.stdin)
    http, grpc, model, cases = said["http"], said["grpc"], said["model"], said["cases"]
    clients: dict[str, Callable[[], Ask]] = {
        "tritonclient.http, binary": lambda: triton_http(http, model, binary=True),
        "tritonclient.http, JSON": lambda: triton_http(http, model, binary=False),
        "tritonclient.http.aio": lambda: triton_http_aio(http, model),
        "tritonclient.grpc": lambda: triton_grpc(grpc, model),
        "tritonclient.grpc.aio": lambda: triton_grpc_aio(grpc, model),
        "kserve REST, binary": lambda: kserve_rest(http, model, binary=True),
        "kserve REST, JSON": lambda: kserve_rest(http, model, binary=False),
        "kserve gRPC": lambda: kserve_grpc(grpc, model),
    }
    failed = 0
    for name, client in clients.items():
        right, problem = await right_answers(client(), cases)
        failed += right != len(cases)
        print(f"{name:26}  {right} of {len(cases)} answers are right  {problem[:200]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
