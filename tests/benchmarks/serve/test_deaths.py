"""Deaths of workers: whom a signal hits, what is seen meanwhile, and what the page says."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve.peers.deaths import SERVERS, Deaths
from benchmarks.serve.peers.deaths_page import deaths_section
from benchmarks.serve.peers.running import REPLACING
from benchmarks.serve.peers.serving import Batching, Serving
from benchmarks.serve.peers.watch import Look, PeerWorkers, Watch, again_s, said
from benchmarks.serve.scheduling import runs, stands_still
from tests.benchmarks.serve.stand_in import Serve, read_head, response, stand_in
from tests.benchmarks.serve.test_page import ENVIRONMENT
from tests.direct.nodes import DEADLINE, until


@pytest.fixture
def sleepers() -> Iterator[list["subprocess.Popen[bytes]"]]:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield processes
    for each in processes:
        each.kill()
        each.wait()


def _serving(folder: Path) -> Serving:
    return Serving("c", 1000, "float", 8000, Batching(8, 0), 20, None, 2, str(folder))


def test_a_peer_s_worker_can_answer_once_it_left_a_file_and_while_it_runs(
    sleepers: list["subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    ready = _serving(tmp_path).ready()
    live = PeerWorkers(ready)
    assert live() == set()
    for each in sleepers:
        (ready / str(each.pid)).touch()
    first, second = sleepers
    assert live() == {first.pid, second.pid}
    os.kill(first.pid, signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)
    assert live() == {second.pid}
    # Until somebody waits for it, it is there and has ended.
    second.kill()
    os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)
    assert live() == set()


def test_each_worker_is_hit_in_turn_and_none_stands_still_in_the_end(
    sleepers: list["subprocess.Popen[bytes]"],
) -> None:
    pids = sorted(each.pid for each in sleepers)
    deaths = Deaths(lambda: set(filter(runs, pids)), signal.SIGSTOP)
    for number, pid in enumerate(pids):
        assert deaths.left() == set(pids[number:])
        deaths(number)
        os.waitpid(pid, os.WUNTRACED)
        assert stands_still(pid)
    deaths(2)  # nobody is left
    assert len(deaths.at_s) == 2
    deaths.end()
    assert [each.wait() for each in sleepers] == [-signal.SIGKILL] * 2


def test_a_worker_that_was_hit_counts_no_more_even_before_it_is_dead(
    sleepers: list["subprocess.Popen[bytes]"],
) -> None:
    pids = {each.pid for each in sleepers}
    deaths = Deaths(lambda: pids, signal.SIGKILL)
    deaths(0)
    assert deaths.left() == {max(pids)}


def test_what_goes_on_without_all_workers_is_seen_until_the_next_death() -> None:
    looks = [
        Look(0.5, 2, True),
        Look(1.1, 1, True),
        Look(1.2, 2, True),
        Look(3.1, 1, True),
        Look(4.9, 1, False),
        Look(5.1, 0, True),
        Look(5.2, 0, False),
        Look(9.0, 2, True),
    ]
    deaths = [1.0, 3.0, 5.0]
    assert again_s(looks, deaths, 2) == [pytest.approx(0.2), None, pytest.approx(4.0)]
    assert again_s(looks[:-1], deaths, 2)[-1] is None
    assert said(looks, deaths, 2) == {
        "after": {"polls": 5, "healthy": 4},
        "fewer": {"polls": 5, "healthy": 3},
        "none": {"polls": 2, "healthy": 1},
    }


def _with_status(status: int) -> Serve:
    async def serve(reader: Any, writer: Any) -> None:
        assert (await read_head(reader))[""] == "/health"
        writer.write(response(status))

    return serve


def _looks_of(watch: Watch) -> list[Look]:
    """Returns what a watch has seen, at least twice."""
    watch.start()
    until(lambda: len(watch._looks) > 1)
    return watch.end()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_a_health_endpoint_is_healthy_only_with_200(status: int, healthy: bool) -> None:
    with stand_in(_with_status(status)) as port:
        watch = Watch(lambda: {1}, f"http://127.0.0.1:{port}/health")
        looks = _looks_of(watch)
    assert {(each.live, each.healthy) for each in looks} == {(1, healthy)}


def test_where_nobody_listens_nothing_is_healthy() -> None:
    watch = Watch(set, "http://127.0.0.1:1/health")
    assert not any(each.healthy for each in _looks_of(watch))


def test_a_watch_tells_what_ended_it() -> None:
    asked = threading.Event()

    def live() -> set[int]:
        asked.set()
        raise RuntimeError("no such folder")

    watch = Watch(live, "http://127.0.0.1:1/health")
    watch.start()
    assert asked.wait(DEADLINE)
    with pytest.raises(RuntimeError, match="no such folder"):
        watch.end()


def test_haproxy_keeps_its_files_in_the_folder_of_a_start(tmp_path: Path) -> None:
    variables = REPLACING["rayserve_haproxy"].environment(_serving(tmp_path))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    places = [each for name, each in variables.items() if name.endswith(("_LOC", "_PATH", "_FILE"))]
    assert len(places) == 3
    assert all(Path(each).parent == tmp_path for each in places)
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in REPLACING["rayserve"].environment(_serving(tmp_path))


def test_the_page_says_what_each_server_lost() -> None:
    run = {
        "scenario": "SIGKILL of a worker",
        "times": 3,
        "offered": 100,
        "in_time": 80,
        "late": 9,
        "refused": {503: 1, 504: 2},
        "lost": {"reset": 7, "status 500": 1},
        "again_s": [0.25, None, 1.5],
        "healthy": {
            "after": {"polls": 30, "healthy": 20},
            "fewer": {"polls": 9, "healthy": 8},
            "none": {"polls": 0, "healthy": 0},
        },
    }
    still = {**run, "lost": {}, "again_s": [None]}
    results = [{**run, "server": name} for name in SERVERS]
    results += [{**still, "server": "mlserver"}]
    settings = {"rate": 60.0, "deadline_s": 0.02}
    text = deaths_section({"environment": ENVIRONMENT, "settings": settings, "results": results})
    assert "60 requests/s, two workers on two cores; in time is within 20 ms" in text
    row = "3 | 100 | 80 | 9 | 3 | 7 reset, 1 status 500 | 2 of 3: 0.9, 1.5 | 20 of 30 | 8 of 9 |  |"
    assert f"| SIGKILL of a worker | torchrec-bls serve, no front | {row}" in text
    assert f"| SIGKILL of a worker | Ray Serve with HAProxy | {row}" in text
    assert "MLServer | 3 | 100 | 80 | 9 | 3 | 0 | 0 of 1 | 20 of 30 |" in text
