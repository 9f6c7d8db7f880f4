"""A service whose model, or whose keeper, is held up: who waits, who leaves, who is refused."""

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import by_json, drawn, json_of, message_of
from tests.serve.running import Running, is_alive, running

pytestmark = pytest.mark.full

CASE = drawn(2, 1)
FULL = drawn(64, 2)  # as many samples as a batch may have
LEAVING = drawn(3, 3)
SOONER = {"timeout": 50_000_000}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A service that holds one version at a time, and its folder."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "new").mkdir()
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--watch", str(folder / "new"), "--drain"]
    options += ["--deadline-ms", "60000", "--max-samples", "64"]
    with running(folder, *options, environment={ranker.HOLD: str(folder)}) as service:
        yield service, folder


def batches(service: Running) -> float:
    return service.metric("torchrec_bls_batch_samples_count")


@contextmanager
def busy(service: Running, folder: Path) -> Iterator[None]:
    """The model runs for a request, and no socket is looked at. After it a request fills the next
    batch, so that others go on waiting. Both get their scores."""
    hold, come = folder / ranker.SERVICE, folder / ranker.HELD
    come.unlink(missing_ok=True)
    hold.touch()
    with ThreadPoolExecutor(1) as pool, accepted(service) as full:
        try:
            asked = pool.submit(by_json, service, CASE.ragged())
            until(come.exists)
            full.sendall(post(service, json_of(FULL.ragged(), parameters=SOONER)))
            yield
        finally:
            hold.unlink()
        answered = http.client.HTTPResponse(full)
        answered.begin()
        [click, _] = json.loads(answered.read())["outputs"]
        for scores, case in ((asked.result().outputs["click"], CASE), (click["data"], FULL)):
            np.testing.assert_allclose(scores, case.scores()["click"], rtol=1e-5, atol=1e-6)


def accepted(service: Running) -> socket.socket:
    """Returns a connection that the service has accepted."""
    connection = service.connect()
    connection.sendall(b"HEAD /v2 HTTP/1.1\r\n\r\n")
    while not connection.recv(1000).endswith(b"\r\n\r\n"):
        pass
    return connection


def post(service: Running, request: object) -> bytes:
    body = json.dumps(request).encode()
    head = f"POST {service.infer_path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_callers_that_leave_while_they_wait_are_not_run(held: tuple[Running, Path]):
    service, folder = held
    before, gone = batches(service), service.count("gone")
    with ExitStack() as stack:
        connections = [stack.enter_context(accepted(service)) for _ in range(3)]
        with busy(service, folder):
            for each in connections:
                each.sendall(post(service, json_of(LEAVING.ragged())))
                each.close()
        until(lambda: service.count("gone") == gone + 3)
        assert batches(service) == before + 2


def test_calls_that_are_cancelled_while_they_wait_are_not_run(held: tuple[Running, Path]):
    service, folder = held
    before = batches(service)
    message = message_of(service.name, LEAVING.ragged(), typed=False)
    with grpc.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        grpc.channel_ready_future(channel).result(60)
        with busy(service, folder):
            for each in [stub.ModelInfer.future(message) for _ in range(3)]:
                each.cancel()
    assert service.ready()
    assert batches(service) == before + 2


def test_requests_are_refused_while_no_version_serves(held: tuple[Running, Path]):
    service, folder = held
    (folder / ranker.KEEPER).touch()
    ranker.write_checkpoint(folder / "new", 2)
    until(lambda: not service.ready())
    status, headers, body = service.request(
        "POST", service.infer_path, json.dumps(json_of(CASE.ragged())).encode()
    )
    assert (status, headers["retry-after"]) == (503, "1")
    assert "v2" in json.loads(body)["error"]
    status, _, body = service.request("GET", "/v2/health/ready")
    assert (status, json.loads(body)["ready"]) == (503, False)
    assert service.get("/v2/health/live") == {"live": True}
    assert service.count("drained") == 1
    (folder / ranker.KEEPER).unlink()
    until(service.ready)
    until(lambda: by_json(service, CASE.ragged()).version.startswith("v2@"))


def test_a_keeper_ends_when_its_service_is_killed(held: tuple[Running, Path]):
    """It is the last one of this module."""
    service, _ = held
    keepers = service.named("keeper")
    assert len(keepers) == 1
    service.process.kill()
    service.process.wait()
    until(lambda: not any(is_alive(each) for each in keepers))
