"""The calls of `clients` by KServe, in an interpreter that has it and no torch."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import kserve
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

from tests.serve.outside.judged import Ask, Outputs, array_of, judge


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


if __name__ == "__main__":
    sys.exit(
        asyncio.run(
            judge(
                {
                    "kserve REST, binary": lambda http, _, model: kserve_rest(
                        http, model, binary=True
                    ),
                    "kserve REST, JSON": lambda http, _, model: kserve_rest(
                        http, model, binary=False
                    ),
                    "kserve gRPC": lambda _, grpc, model: kserve_grpc(grpc, model),
                }
            )
        )
    )
