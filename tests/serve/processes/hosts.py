"""A service on each of two hosts, and on the first one the proxy of examples/several_hosts.cfg.

    python tests/launch/two_hosts.py python -m tests.serve.processes.hosts FOLDER WHAT ...

has the proxy asked at a steady rate, while the second host does each of these: "cut" pulls its
cable, and plugs it in again; "kill" kills all processes of its service; "end" tells that to end.
The program fails if a request is lost. FOLDER has a checkpoint "v1", and what the two hosts tell
each other.
"""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from urllib.request import urlopen

from tests.direct.nodes import until
from tests.serve.asking import Answered, by_binary, by_grpc, by_json
from tests.serve.processes.asked import CASE, PATIENT, version_in
from tests.serve.running import PATIENCE, Running, descendants, is_alive, running
from torchrec_bls.serve.processes.front_process import haproxy

# As in the configuration.
PORTS, OUTER_PORTS, STATS = (8000, 8001), (8080, 8081), "http://127.0.0.1:8404/;csv"
# The deadline is the proxy's alone: other work of this machine makes no request late.
OPTIONS = ["--workers", "1", "--front", "haproxy", "--host", "0.0.0.0", "--deadline-ms", "60000"]
# Seconds between two requests, and that they go on after each change.
EVERY, AFTER = 0.02, 0.5
# Callers at once: all that wait for a host whose cable is cut, five times over.
CALLERS = 512
Asked = tuple[str, "Future[int]"]


def main(folder: Path, *todo: str) -> None:
    """Runs a host."""
    number = int(socket.gethostname().removeprefix("host"))
    here = folder / f"host{number}"
    here.mkdir()
    with running(here, "--checkpoint", str(folder / "v1"), *OPTIONS, ports=PORTS) as service:
        (folder / f"ready{number}").touch()
        if number:
            for what in todo:
                until(lambda: (folder / what).exists(), PATIENCE)  # noqa: B023
                {"cut": _cut, "kill": _kill, "end": _end}[what](service, folder)
            until(lambda: (folder / "over").exists(), PATIENCE)
            return
        until(lambda: (folder / "ready1").exists(), PATIENCE)
        with _proxy(here) as proxy:
            for what in todo:
                until(_is_up)
                _check(proxy, folder, what)
        (folder / "over").touch()


def _cut(service: Running, folder: Path) -> None:
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    until(lambda: (folder / "plug").exists())
    subprocess.run(["ip", "link", "set", "cable", "up"], check=True)


def _kill(service: Running, folder: Path) -> None:
    processes = [service.pid, *descendants(service.pid)]
    for each in processes:
        with suppress(ProcessLookupError):  # it has ended with another one
            os.kill(each, signal.SIGKILL)
    service.process.wait()
    until(lambda: not any(is_alive(each) for each in processes))


def _end(service: Running, folder: Path) -> None:
    service.process.terminate()
    assert service.process.wait(60) == 0, service.log


@contextmanager
def _proxy(folder: Path) -> Iterator[Running]:
    """Runs the proxy, which is asked as a service is."""
    log = folder / "proxy.txt"
    command = [haproxy(), "-db", "-f", "examples/several_hosts.cfg"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        proxy = Running(process, *OUTER_PORTS, "ranker", log)
        until(proxy.ready)
        yield proxy
    finally:
        process.kill()
        process.wait()


def _told(column: str) -> list[str]:
    """Returns what the proxy's statistics say of the second host, for each protocol."""
    with urlopen(STATS, timeout=60) as page:
        rows = csv.DictReader(page.read().decode().splitlines())
        found = [row[column] for row in rows if row["svname"] == "host1"]
    assert len(found) == 2
    return found


def _is_up() -> bool:
    """Returns whether the second host gets requests of both protocols."""
    return all(each.startswith("UP") for each in _told("status"))


@contextmanager
def _asked_steadily(proxy: Running) -> Iterator[list[Asked]]:
    """Asks in three ways by turns, whether or not there are answers."""
    asked: list[Asked] = []
    ends = Event()

    def ask(way: Callable[..., Answered]) -> int:
        return version_in(way(proxy, CASE.ragged(), parameters=PATIENT))

    def ask_all() -> None:
        for way in cycle((by_json, by_binary, by_grpc)):
            asked.append((way.__name__, pool.submit(ask, way)))
            if ends.wait(EVERY):
                return

    with ThreadPoolExecutor(CALLERS) as pool:
        thread = Thread(target=ask_all)
        thread.start()
        try:
            yield asked
        finally:
            ends.set()
            thread.join()


def _check(proxy: Running, folder: Path, what: str) -> None:
    """Has the other host do something while the proxy is asked, and checks each answer."""
    with _asked_steadily(proxy) as asked:
        (folder / what).touch()
        until(lambda: not _is_up())
        time.sleep(AFTER)
    if what == "cut":
        (folder / "plug").touch()
    lost = [f"{name}: {error}" for name, each in asked if (error := each.exception()) is not None]
    # Of answers by gRPC one may be cut off that was written just before a death.
    cut = [each for each in lost if each.startswith("by_grpc: CANCELLED: ")]
    resent = sum(map(int, _told("wredis")))
    print(f"{what}: {len(asked)} asked, {resent} resent so far, lost: {lost}")
    assert len(cut) <= (what == "kill") and len(lost) == len(cut), proxy.log
    assert resent or what == "end"  # else the host got none when it died


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
