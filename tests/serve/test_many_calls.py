"""Calls by gRPC that are more than the service holds at once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from tests.direct.nodes import DEADLINE
from tests.processes import run
from tests.serve.fakes import Model, engine_of
from torchrec_bls.serve import grpc_service
from torchrec_bls.serve.desk import Desk
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.grpc_service import GrpcService
from torchrec_bls.serve.observer import Observer


def request() -> Any:
    made = messages.ModelInferRequest(model_name="m")
    made.inputs.add(name="dense", datatype="FP32", shape=[1, 1])
    made.inputs.add(name="f", datatype="INT64", shape=[1])
    made.raw_input_contents.extend([bytes(4), bytes(8)])
    return made


def test_calls_beyond_the_most_are_refused_at_once(tmp_path: Path) -> None:
    # In a process of its own. Where the collector finds what is left of gRPC's part for asyncio, it
    # joins a thread of it, which may not end once the loop is closed: a later test would hang.
    run(1, call_beyond_the_most, tmp_path, backend=None)


def call_beyond_the_most(_: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grpc_service, "_MOST_CALLS", 2)
        engine = engine_of(Model(), monkeypatch)  # nobody runs it, so that its requests wait
        asyncio.run(asyncio.wait_for(ask(engine, f"unix:{folder}/s"), DEADLINE))


async def ask(engine: Engine, address: str) -> None:
    desk = Desk(engine, Observer(lambda: None), None, has_front=False)
    facts: Any = SimpleNamespace(
        check_name=lambda model: None, check_outputs=lambda asked: None, name="m"
    )
    server = GrpcService(desk, facts).server(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        held = [infer(request()) for _ in range(2)]
        while engine.waiting < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await infer(request())
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()
        # Their places are free again.
        late = infer(request())
        while engine.waiting < 3:
            await asyncio.sleep(0.01)
        late.cancel()
    await server.stop(None)
