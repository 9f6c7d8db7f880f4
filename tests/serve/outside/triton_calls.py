"""The calls of `clients` by tritonclient, in an interpreter that has it and no torch."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from tests.serve.outside.judged import Ask, Outputs, array_of, judge

_OUTPUTS = ("click", "topics")


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
    async def ask(tensors: Sequence[Any]) -> Outputs:
        inputs = triton_inputs(tritonclient.http, tensors)
        async with tritonclient.http.aio.InferenceServerClient(place) as client:
            return by_name(await client.infer(model, inputs))

    return ask


def triton_grpc_aio(place: str, model: str) -> Ask:
    async def ask(tensors: Sequence[Any]) -> Outputs:
        inputs = triton_inputs(tritonclient.grpc, tensors)
        async with tritonclient.grpc.aio.InferenceServerClient(place) as client:
            return by_name(await client.infer(model, inputs))

    return ask


if __name__ == "__main__":
    sys.exit(
        asyncio.run(
            judge(
                {
                    "tritonclient.http, binary": lambda http, _, model: triton_http(
                        http, model, binary=True
                    ),
                    "tritonclient.http, JSON": lambda http, _, model: triton_http(
                        http, model, binary=False
                    ),
                    "tritonclient.http.aio": lambda http, _, model: triton_http_aio(http, model),
                    "tritonclient.grpc": lambda _, grpc, model: triton_grpc(grpc, model),
                    "tritonclient.grpc.aio": lambda _, grpc, model: triton_grpc_aio(grpc, model),
                }
            )
        )
    )
