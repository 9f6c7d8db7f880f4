"""A service that is told to end says so for a while, and answers on: whoever sends it requests can
send them elsewhere before it refuses any."""

import signal
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import by_grpc, by_json
from tests.serve.processes.asked import CASE, PATIENT, version_in
from tests.serve.running import PATIENCE, Running, running
from torchrec_bls.serve.processes import supervisor

pytestmark = pytest.mark.full


def is_ready_by_grpc(service: Running) -> bool:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        reply = stub.ServerReady(messages.ServerReadyRequest(), timeout=PATIENCE)
    ready: bool = reply.ready
    return ready


def test_it_answers_on_though_it_is_not_ready(tmp_path: Path) -> None:
    checkpoint = ranker.write_checkpoint(tmp_path, 1)
    with running(tmp_path, "--checkpoint", str(checkpoint), "--deadline-ms", "60000") as service:
        assert is_ready_by_grpc(service)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: not service.ready())
        status, _, body = service.request("GET", "/v2/health/ready")
        assert (status, body) == (503, b'{"ready":false,"error":"the service is about to end"}')
        assert not is_ready_by_grpc(service)
        for ask in (by_json, by_grpc):
            assert version_in(ask(service, CASE.ragged(), parameters=PATIENT)) == 1
        assert f"the service ends in {supervisor.LEAVING:g} s" in service.log
        # It is alive, so that nobody kills it meanwhile.
        assert service.request("GET", "/v2/health/live")[0] == 200
        assert service.process.wait(PATIENCE) == 0, service.log
