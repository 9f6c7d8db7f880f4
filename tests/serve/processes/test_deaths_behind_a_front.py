"""With a front, no caller notices that a worker, the zygote or the keeper has died."""

import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import Refused, by_grpc, by_json
from tests.serve.processes.asked import (
    CASE,
    PATIENT,
    RENEWAL,
    all_answer,
    asked_all_the_while,
    lose,
    losing_workers,
    served,
    starts,
    version_in,
)
from tests.serve.running import Running, is_alive, running

pytestmark = pytest.mark.full

# A worker that stands still for so long is not ready. Requests have more time.
OPTIONS = ["--deadline-ms", "1000", "--workers", "2", "--front", "haproxy"]
WORKERS = ["worker 1", "worker 2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("front")
    (made / "new").mkdir()
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Running]:
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--watch", str(folder / "new"), *OPTIONS]
    environment = {ranker.RAISE: str(folder / "raise")}
    model = "tests.serve.ranker:build_poisonous_unless"
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, 1024), most))
    try:
        with running(folder, *options, model=model, environment=environment) as service:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
            until(lambda: all_answer(service))
            yield service
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "death"), (signal.SIGSTOP, "stall")]
)
@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_that_is_lost_costs_no_request(
    service: Running, name: str, number: int, cause: str
):
    before = service.only(name)
    with asked_all_the_while(service) as asked:
        lose(service, name, number, cause)
    assert not asked.lost
    assert asked.cut <= (cause == "death")  # there is one caller by gRPC
    assert not is_alive(before)


def test_a_worker_that_stands_still_for_a_while_costs_no_request(service: Running):
    before, silences = service.only("worker 1"), service.log.count(" is not ready: ")
    with asked_all_the_while(service) as asked:
        os.kill(before, signal.SIGSTOP)
        until(lambda: service.log.count(" is not ready: ") > silences)
        os.kill(before, signal.SIGCONT)
        until(lambda: all_answer(service))
    assert not asked.lost and not asked.cut
    assert service.only("worker 1") == before


def test_a_worker_that_can_accept_no_connection_costs_no_request(service: Running):
    # The front has no connection for gRPC to a worker that has just begun.
    lose(service, "worker 1")
    before = service.only("worker 1")
    few, most = resource.prlimit(before, resource.RLIMIT_NOFILE)
    assert few == most > 1024  # though a shell would allow 1,024
    with asked_all_the_while(service) as asked:
        resource.prlimit(before, resource.RLIMIT_NOFILE, (3, most))
        until(lambda: not is_alive(before) and all_answer(service))
    assert service.log.count("can accept no connection: ") == 1
    assert not asked.lost and not asked.cut


def test_workers_that_are_lost_one_after_the_other(service: Running):
    with asked_all_the_while(service) as asked:
        for number in range(10):
            lose(service, WORKERS[number % 2])
    assert not asked.lost
    assert asked.cut <= 10


def test_what_the_front_can_not_keep_passes_all_the_same(service: Running):
    """It keeps 1 MiB of a request."""
    for ask in (by_json, by_grpc):
        answer = ask(service, CASE.ragged(), parameters=PATIENT, id="x" * (2 << 20))
        assert version_in(answer) and len(answer.id) == 2 << 20


def test_a_zygote_that_is_killed_has_a_successor(service: Running):
    before, worker = service.only("zygote"), service.only("worker 1")
    with asked_all_the_while(service) as asked:
        os.kill(before, signal.SIGKILL)
        until(lambda: service.named("zygote") not in ([], [before]))
        # Its own workers outlive it. Another one can be made again.
        assert service.only("worker 1") == worker
        with losing_workers(service, deadline=RENEWAL):
            os.kill(worker, signal.SIGKILL)
    assert not asked.lost
    assert asked.cut <= 1


def test_a_keeper_that_is_killed_has_a_successor(service: Running, folder: Path):
    before, version = service.only("keeper"), served(service)
    with asked_all_the_while(service) as asked:
        os.kill(before, signal.SIGKILL)
        until(lambda: service.named("keeper") not in ([], [before]))
        ranker.write_checkpoint(folder / "new", version + 1)
        until(lambda: served(service) == version + 1)
    assert not asked.lost and not asked.cut


def test_a_front_that_is_killed_has_a_successor(service: Running):
    before = service.only("front")
    os.kill(before, signal.SIGKILL)
    # Who connects now waits for the next one.
    served(service)
    until(lambda: service.named("front") not in ([], [before]))


def test_a_request_that_kills_its_worker_gets_two_and_no_third(service: Running):
    poison = replace(CASE, dense=[[ranker.POISON, 0.0, 0.0]] * 3).ragged()
    for ask in (by_json, by_grpc):
        with losing_workers(service, times=2), pytest.raises(Refused) as refused:
            ask(service, poison, parameters=PATIENT)
        assert refused.value.status in (500, "UNKNOWN")
    served(service)


def test_new_workers_have_the_code_of_today(service: Running, folder: Path):
    before = [service.only(name) for name in WORKERS]
    renewed = starts(service, "renewal")
    with asked_all_the_while(service) as asked:
        service.process.send_signal(signal.SIGHUP)
        until(lambda: starts(service, "renewal") == renewed + 2, RENEWAL)
        until(lambda: not any(is_alive(each) for each in before))
        until(lambda: all_answer(service))
    assert not asked.lost and not asked.cut
    assert len(service.named("zygote")) == 1
    # What was made in the background answers as those before it.
    niceness = {os.getpriority(os.PRIO_PROCESS, service.only(name)) for name in WORKERS}
    assert niceness == {os.getpriority(os.PRIO_PROCESS, service.pid)}


def test_code_that_can_not_be_loaded_replaces_nobody(service: Running, folder: Path):
    before = [service.only(name) for name in ("zygote", *WORKERS)]
    (folder / "raise").touch()
    with asked_all_the_while(service) as asked:
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "workers are not replaced" in service.log, RENEWAL)
    (folder / "raise").unlink()
    assert not asked.lost and not asked.cut
    assert "ZeroDivisionError: no model today" in service.log
    assert [service.only(name) for name in ("zygote", *WORKERS)] == before


def test_a_service_without_workers_says_so(service: Running):
    zygote = service.only("zygote")
    os.kill(zygote, signal.SIGSTOP)
    try:
        for name in WORKERS:
            os.kill(service.only(name), signal.SIGKILL)
        until(lambda: not service.ready())
        with pytest.raises(Refused) as refused:
            by_json(service, CASE.ragged())
        assert refused.value.status == 503
        assert service.request("GET", "/v2/health/live")[0] == 200
    finally:
        os.kill(zygote, signal.SIGCONT)
    until(lambda: service.ready() and all_answer(service))
    served(service)


def test_all_end_with_the_supervisor(service: Running):
    """It is the last one of this module."""
    names = ("front", "zygote", "keeper", *WORKERS)
    processes = [service.only(name) for name in names]
    service.process.kill()
    service.process.wait()
    until(lambda: not any(is_alive(each) for each in processes))
