"""The generator as a process, against a server of the wire."""

import os

import pytest

from benchmarks.serve import traffic
from benchmarks.serve.encoding import encode
from benchmarks.serve.generator import REQUESTS, Generator, Load, open_inference
from tests.benchmarks.serve.stand_in import answering, read_request, response, stand_in

pytestmark = pytest.mark.full

ROWS = 50


def test_it_sends_the_requests_of_its_traffic_and_reads_cpu_times() -> None:
    arrived = []

    async def serve(reader, writer) -> None:  # type: ignore[no-untyped-def]
        while True:
            arrived.append(await read_request(reader))
            writer.write(response(200, b"yes"))

    with stand_in(serve) as port:
        url = f"http://127.0.0.1:{port}/v2/models/m/infer"
        load = Load(
            url,
            open_inference(url, 10.0),
            rows=ROWS,
            core=max(os.sched_getaffinity(0)),
            deadline_s=10.0,
            servers=[os.getpid()],
        )
        with Generator(load) as generator:
            outcome = generator.run(rate=200.0, seconds=1.0, seed=4, keep=True)
            again = generator.run(rate=10.0, seconds=0.5, seed=5)
    moments = len(traffic.arrivals(200.0, 1.0, 4))
    assert (outcome.offered, outcome.sent, outcome.in_time) == (moments, moments, moments)
    assert sorted(turn for turn, _ in outcome.kept) == list(range(moments))
    assert outcome.generator_s > 0.0 and outcome.server_s > 0.0
    assert (again.kept, again.offered) == ([], len(traffic.arrivals(10.0, 0.5, 5)))
    expected = [encode(each, "/v2/models/m/infer", 10.0) for each in traffic.requests(3, ROWS)]
    bodies = [whole.partition(b"\r\n\r\n")[2] for whole in expected]
    assert [head[""] for head, _ in arrived[:3]] == ["/v2/models/m/infer"] * 3
    assert {body for _, body in arrived} >= set(bodies)
    assert moments < REQUESTS


def test_a_dead_server_is_an_error_and_others_are_not_loaded() -> None:
    with stand_in(answering(response())) as port:
        pass
    url = f"http://127.0.0.1:{port}/"
    load = Load(url, open_inference(url), rows=ROWS, core=max(os.sched_getaffinity(0)))
    with Generator(load) as generator, pytest.raises(ConnectionError, match="start the server"):
        generator.run(10.0, 0.1)
    with pytest.raises(ValueError, match="loads stay here"):
        Generator(Load("http://10.0.0.1:80/", open_inference("")))
