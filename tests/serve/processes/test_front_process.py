"""A front that is told which workers get requests, with workers that do as the test says."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.serve.running import HOST
from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.places import Places, held
from torchrec_bls.serve.processes.front_process import FrontProcess, Turn

pytestmark = pytest.mark.full

PATIENCE = 60.0
Reply = tuple[int, str]
ONE, BOTH = {"1a": Turn.READY}, {"1a": Turn.READY, "2a": Turn.READY}


class Worker:
    """Answers each request with its name, once it may.

    Args:
        path: the socket at which it takes requests.

    Attributes:
        asked: how many requests it has got.
        may_answer: whether it answers.
    """

    def __init__(self, path: Path) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + path.stem.encode()
        self._has_ended = False
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self) -> None:
        """Ends as a process does that is killed."""
        self._has_ended = True
        self.may_answer.set()
        for each in (self._listener, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(1 << 16):
                self.asked += 1
                self.may_answer.wait(PATIENCE)
                if self._has_ended:
                    return
                connection.sendall(self._reply)


class Asking:
    """A front that runs, and callers of it."""

    def __init__(self, front: FrontProcess, port: int, pool: ThreadPoolExecutor) -> None:
        self.front = front
        self._port = port
        self._pool = pool

    def tell(self, turns: Mapping[str, Turn], condition: Callable[[], bool]) -> None:
        """Tells the front of workers, again and again until it knows and a condition is met."""
        end = time.monotonic() + PATIENCE
        while True:
            self.front.look(time.monotonic(), turns)
            if turns.items() <= self.front._told.items() and condition():
                return
            assert time.monotonic() < end
            time.sleep(0.005)

    def ask(self, path: str = "/") -> Reply:
        with closing(HTTPConnection(HOST, self._port, timeout=PATIENCE)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def begin_to_ask(self) -> "Future[Reply]":
        return self._pool.submit(self.ask)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    made = [Worker(tmp_path / f"{name}.http") for name in ("1a", "2a")]
    yield made
    for each in made:
        each.end()


@pytest.fixture
def asking(tmp_path: Path, workers: list[Worker]) -> Iterator[Asking]:
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        http = stack.enter_context(held(HOST, 0, "--port"))
        port = http.getsockname()[1]
        places = Places(tmp_path, HOST, port, None, front=True)
        front = stack.enter_context(FrontProcess(places, 2, Contract(), {"http": http}))
        asking = Asking(front, port, pool)

        def listens() -> bool:
            with suppress(OSError):
                return asking.ask("/v2/health/live")[0] == 200
            return False

        asking.tell({}, listens)
        yield asking
        for each in workers:  # else it would wait for them
            each.end()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_workers_get_requests_from_when_it_is_told(asking: Asking, workers: list[Worker]):
    assert asking.ask()[0] == 503
    assert asking.ask("/v2/health/ready") == (503, '{"ready":false,"error":"no worker answers"}')
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))
    assert asking.ask("/v2/health/ready") == (200, "1a")  # it says whether it is
    asking.tell({"2a": Turn.READY}, lambda: asking.ask() == (200, "2a"))


def test_one_that_can_not_be_told_yet_is_told_later(tmp_path: Path, workers: list[Worker]):
    with held(HOST, 0, "--port") as http, ThreadPoolExecutor() as pool:
        port = http.getsockname()[1]
        places = Places(tmp_path, HOST, port, None, front=True)
        with FrontProcess(places, 2, Contract(), {"http": http}) as front:
            asking = Asking(front, port, pool)
            front.look(time.monotonic(), ONE)
            # It does not listen for orders: it has just begun.
            front.look(time.monotonic(), {"2a": Turn.READY})

            def answers() -> bool:
                with suppress(OSError):
                    return asking.ask() == (200, "2a")
                return False

            asking.tell({"2a": Turn.READY}, answers)


def test_another_one_knows_what_the_first_one_knew(asking: Asking, workers: list[Worker]):
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))
    process = asking.front._process
    assert process is not None
    process.kill()
    process.wait()
    asking.tell(ONE, lambda: asking.front.pid not in (0, process.pid))
    assert asking.ask() == (200, "1a")  # who connects waits for it


def test_a_port_whose_connections_were_open_at_the_end_can_be_had_at_once(
    tmp_path: Path, workers: list[Worker]
):
    with ExitStack() as stack:
        http = stack.enter_context(held(HOST, 0, "--port"))
        port = http.getsockname()[1]
        places = Places(tmp_path, HOST, port, None, front=True)
        front = stack.enter_context(FrontProcess(places, 2, Contract(), {"http": http}))
        front.look(time.monotonic(), ONE)
        caller = stack.enter_context(closing(HTTPConnection(HOST, port, timeout=PATIENCE)))

        def answers() -> bool:
            with suppress(OSError):
                caller.request("GET", "/")
                return caller.getresponse().read() == b"1a"
            caller.close()
            return False

        until(answers)
        with pytest.raises(OSError, match="cannot listen"), held(HOST, port, "--port"):
            pass
        process = front._process
        assert process is not None
        process.kill()
        process.wait()
        http.close()
        with held(HOST, port, "--port"):
            pass


def test_one_without_room_for_its_file_begins_later(
    tmp_path: Path, asking: Asking, caplog: pytest.LogCaptureFixture
):
    process = asking.front._process
    assert process is not None
    (tmp_path / "haproxy.cfg").unlink()
    (tmp_path / "haproxy.cfg").mkdir()
    process.kill()
    process.wait()
    asking.tell(ONE, lambda: "the front can't be started: " in caplog.text)
    assert not asking.front.pid
    (tmp_path / "haproxy.cfg").rmdir()
    asking.tell(ONE, lambda: asking.front.pid != 0)
    assert asking.ask() == (200, "1a")


def test_others_get_what_a_worker_holds_that_stands_still(asking: Asking, workers: list[Worker]):
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))
    workers[0].may_answer.clear()
    before = workers[0].asked
    held_up = [asking.begin_to_ask() for _ in range(3)]
    until(lambda: workers[0].asked == before + 3)
    turns = {"1a": Turn.STALLED, "2a": Turn.READY}
    asking.tell(turns, lambda: all(each.done() for each in held_up))
    assert [each.result() for each in held_up] == [(200, "2a")] * 3
    # It was a false alarm.
    workers[0].may_answer.set()
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))


def test_others_get_what_a_worker_holds_that_dies(asking: Asking, workers: list[Worker]):
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))
    workers[0].may_answer.clear()
    before = workers[0].asked
    held_up = asking.begin_to_ask()
    until(lambda: workers[0].asked == before + 1)
    asking.tell(BOTH, lambda: asking.ask() == (200, "2a"))
    workers[0].end()
    # The front finds out by itself.
    assert held_up.result() == (200, "2a")
    assert [asking.ask() for _ in range(4)] == [(200, "2a")] * 4


def test_it_is_done_with_a_worker_that_has_answered_all(asking: Asking, workers: list[Worker]):
    asking.tell(ONE, lambda: asking.ask() == (200, "1a"))
    assert not asking.front.is_done_with("1a")  # it gets requests
    workers[0].may_answer.clear()
    before = workers[0].asked
    held_up = asking.begin_to_ask()
    until(lambda: workers[0].asked == before + 1)
    turns = {"1a": Turn.LEAVING, "2a": Turn.READY}
    asking.tell(turns, lambda: asking.ask() == (200, "2a"))
    assert not asking.front.is_done_with("1a")
    workers[0].may_answer.set()
    until(lambda: asking.front.is_done_with("1a"))
    assert held_up.result() == (200, "1a")


def test_a_front_that_does_not_run_is_done_with_all(asking: Asking):
    asking.front.close()
    assert asking.front.is_done_with("1a")


def test_orders_that_can_not_be_given_are_in_the_log(
    asking: Asking, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "haproxy.admin").unlink()
    now = time.monotonic()
    asking.front.look(now, ONE)
    assert not caplog.text
    asking.front.look(now + 60, ONE)
    assert "the front can't be told which workers answer: " in caplog.text
    assert not asking.front.is_done_with("1a")
