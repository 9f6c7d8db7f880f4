"""A worker that is asked reports of all, also where some do not answer."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from torchrec_bls.serve import siblings
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.siblings import Report, metrics_of, reports


def report_of(answers: int) -> Report:
    observer = Observer(lambda: None)
    for _ in range(answers):
        observer.ended(Outcome.OK, 0.0, 0.001)
    return Report(observer.tally.told(), observer.exposition().decode(), observer.freshness)


def test_metrics_of_several_have_the_number_of_their_worker() -> None:
    text = metrics_of({"1a": report_of(5), "2b": report_of(7)}).decode()
    answered = {
        sample.labels["worker"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "torchrec_bls_requests_total" and sample.labels["outcome"] == "ok"
    }
    assert answered == {"1a": 5, "2b": 7}
    # Prometheus refuses a family that is told twice.
    helps = [line for line in text.splitlines() if line.startswith("# HELP ")]
    assert len(helps) == len(set(helps)) > 5
    assert text.count("torchrec_bls_queue_seconds_count{") == 2


@contextlib.asynccontextmanager
async def answering(path: Path, reply: bytes) -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(f"GET {siblings.PATH} HTTP/1.1\r\n".encode())
        writer.write(reply)
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield


def test_who_does_not_answer_is_left_out(tmp_path: Path) -> None:
    report = report_of(3)
    sockets = {name: tmp_path / f"{name}.http" for name in "abcdef"}
    body = msgspec.json.encode(report)

    async def ask() -> dict[str, Report]:
        with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as dead:
            stopped.bind(str(sockets["d"]))
            stopped.listen()  # and never accepts
            dead.bind(str(sockets["e"]))  # of a process that has ended
            async with (
                answering(sockets["a"], b"HTTP/1.1 200 OK\r\n\r\n" + body),
                answering(sockets["b"], b"HTTP/1.1 503 \r\n\r\n{}"),
                answering(sockets["c"], b"HTTP/1.1 200 OK\r\n\r\n" + body[:-5]),
            ):
                return await reports(sockets)

    found = asyncio.run(asyncio.wait_for(ask(), 30))
    assert found == {"a": report}
