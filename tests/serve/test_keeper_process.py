"""The process that keeps the tables: its deaths, new checkpoints, and the end of the service."""

import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import Answered, by_grpc, by_json, drawn, json_of
from tests.serve.running import Running, is_alive, running

pytestmark = pytest.mark.full

CASE = drawn(3, 1)
DEADLINE = ["--deadline-ms", "60000"]


def version_in(answer: Answered) -> int:
    """Returns the version of an answer, which has the scores of that version."""
    version = int(answer.version.partition("@")[0].removeprefix("v"))
    for name, values in CASE.scores(version).items():
        np.testing.assert_allclose(answer.outputs[name], values, rtol=1e-5, atol=1e-3)
    return version


def served(service: Running) -> int:
    return version_in(by_json(service, CASE.ragged()))


def check_freshness(service: Running, began: float) -> None:
    """The service says how long the last version took to its first answer, at most until now."""
    count, total = (
        service.metric(f"torchrec_bls_freshness_seconds_{each}") for each in ("count", "sum")
    )
    assert count >= 1 and total > 0
    trained = service.metric("torchrec_bls_version_trained_timestamp_seconds", max)
    assert began - 5 < trained < time.time()
    [shown] = re.findall(r"From training to answers</dt><dd>(.*?)</dd>", page_of(service))
    number, unit = shown.split()
    seconds = float(number) / {"ms": 1000, "s": 1}[unit]
    assert 0 < seconds < time.time() - trained + 0.1


def page_of(service: Running) -> str:
    return service.request("GET", "/")[2].decode()


@contextmanager
def asked_all_the_while(service: Running) -> Iterator[None]:
    """Asks again and again; each answer is right."""
    ends, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not ends.is_set():
                served(service)
                version_in(by_grpc(service, CASE.ragged()))
                time.sleep(0.01)  # a keeper gives way to whoever asks
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    assert not failures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("watched")
    (made / "new").mkdir()
    return made


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Running]:
    """A service of version 1 that watches `folder / "new"`. Each test leaves it with a newer
    one."""
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--watch", str(folder / "new"), *DEADLINE]
    with running(folder, *options) as service:
        # Who takes the tables over has nothing to load.
        shutil.rmtree(checkpoint)
        yield service


def test_a_keeper_that_is_killed_has_a_successor(watched: Running, folder: Path):
    [keeper] = watched.named("keeper")
    before = served(watched)
    with asked_all_the_while(watched):
        os.kill(keeper, signal.SIGKILL)
        until(lambda: watched.named("keeper") not in ([], [keeper]))
        [successor] = watched.named("keeper")
        ranker.write_checkpoint(folder / "new", before + 1)
        until(lambda: served(watched) == before + 1)
    assert watched.named("keeper") == [successor]
    assert watched.ready()


def test_a_keeper_that_can_not_be_started_is_tried_again(watched: Running):
    [keeper] = watched.named("keeper")
    most, hard = resource.prlimit(watched.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(watched.pid, resource.RLIMIT_NOFILE, (1, hard))
    try:
        os.kill(keeper, signal.SIGKILL)
        until(lambda: "can't be started" in watched.log)
    finally:
        resource.prlimit(watched.pid, resource.RLIMIT_NOFILE, (most, hard))
    until(lambda: watched.named("keeper") not in ([], [keeper]))
    served(watched)


def test_deltas_are_served_one_after_the_other(watched: Running, folder: Path):
    with asked_all_the_while(watched):
        for _ in range(3):
            before = served(watched)
            [version] = watched.get(f"/v2/models/{watched.name}")["versions"]
            ranker.write_delta(folder / "new", before + 1, version)
            began = time.time()
            until(lambda expected=before + 1: served(watched) == expected)
            check_freshness(watched, began)
        # A checkpoint goes on from there.
        ranker.write_checkpoint(folder / "new", before + 2)
        until(lambda: served(watched) == before + 2)


@pytest.mark.parametrize("kind", ["checkpoint", "delta"])
def test_a_version_without_scores_is_not_served(watched: Running, folder: Path, kind: str):
    before = served(watched)
    [version] = watched.get(f"/v2/models/{watched.name}")["versions"]
    with asked_all_the_while(watched):
        if kind == "checkpoint":
            ranker.write_checkpoint(folder / "new", before + 1, nan=True)
        else:
            ranker.write_delta(folder / "new", before + 1, version, nan=True)
        until(lambda: watched.metric("torchrec_bls_refresh_problem") == 1)
        assert served(watched) == before
        assert watched.metric("torchrec_bls_failed_refreshes_total") >= 1
        assert "nan at" in watched.log
        assert f"v{before + 1}" in page_of(watched)
        ranker.write_checkpoint(folder / "new", before + 2)
        until(lambda: served(watched) == before + 2)
        until(lambda: watched.metric("torchrec_bls_refresh_problem") == 0)


def test_a_new_version_is_served_without_a_request_before(watched: Running, folder: Path):
    """Who asks for that version alone would be refused for ever."""
    before = served(watched)
    ranker.write_checkpoint(folder / "new", before + 1)

    def version() -> str:
        [found] = watched.get(f"/v2/models/{watched.name}")["versions"]
        return found

    until(lambda: version().startswith(f"v{before + 1}@"))
    path = f"/v2/models/{watched.name}/versions/{version()}/infer"
    assert watched.infer({"inputs": []}, path)[0] == 400  # but not 404


def test_a_keeper_that_hangs_holds_no_answer_up(watched: Running, folder: Path):
    [keeper] = watched.named("keeper")
    before = served(watched)
    os.kill(keeper, signal.SIGSTOP)
    try:
        ranker.write_checkpoint(folder / "new", before + 1)
        for _ in range(5):
            assert served(watched) == before
    finally:
        os.kill(keeper, signal.SIGCONT)
    until(lambda: served(watched) == before + 1)


def test_what_was_begun_is_answered_when_the_service_is_told_to_end(watched: Running):
    """It is the last one of this module."""
    body = json.dumps(json_of(CASE.ragged())).encode()
    keepers = watched.named("keeper")
    with watched.connect() as begun, watched.connect() as idle:
        head = f"POST {watched.infer_path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        begun.sendall(head.encode() + body[:-1])
        assert watched.ready()  # it has read the above
        # As systemd has it: all of them are told.
        for each in (watched.pid, *keepers):
            os.kill(each, signal.SIGTERM)
        assert idle.recv(1) == b""
        assert all(is_alive(each) for each in keepers)
        begun.sendall(body[-1:])
        with begun.makefile("rb") as answered:
            assert answered.read().startswith(b"HTTP/1.1 200 ")  # until the connection is closed
    assert watched.process.wait(60) == 0, watched.log
    until(lambda: not any(is_alive(each) for each in keepers))
