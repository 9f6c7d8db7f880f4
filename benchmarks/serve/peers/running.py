"""The peers as processes: how each is started, told and asked."""

import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve import traffic
from benchmarks.serve.generator import Encode
from benchmarks.serve.peers import wire
from benchmarks.serve.peers.install import interpreter
from benchmarks.serve.peers.serving import Serving
from benchmarks.serve.responses import Response
from benchmarks.serve.service import SERVER_CORE, Service, free_port, started

_ANSWER_S = 2.0


@dataclass(frozen=True)
class Peer:
    """A server as software.

    Attributes:
        title: its name.
        path: of requests.
        command: starts it.
        environment: what it is told by variables, besides `Serving.environment`.
        health: path of its health endpoint, where one is asked.
    """

    title: str
    path: str
    command: Callable[[Serving], list[str]]
    environment: Callable[[Serving], dict[str, str]] = lambda _: {}
    health: str = ""

    @property
    def encode(self) -> Encode:
        """Makes a POST of a request."""
        return functools.partial(wire.encode, path=self.path)


def _module(name: str) -> Callable[[Serving], list[str]]:
    module = f"benchmarks.serve.peers.servers.with_{name}"
    return lambda _: [str(interpreter(name)), "-m", module]


def _bentoml(serving: Serving) -> list[str]:
    program = str(interpreter("bentoml").with_name("bentoml"))
    place = ["--host", "127.0.0.1", "--port", str(serving.port)]
    return [program, "serve", "benchmarks.serve.peers.servers.with_bentoml:Scores", *place]


def _mosec_environment(serving: Serving) -> dict[str, str]:
    told = {
        "MOSEC_ADDRESS": "127.0.0.1",
        "MOSEC_PORT": str(serving.port),
        "MOSEC_TIMEOUT": str(serving.deadline_ms),
        "MOSEC_LOG_LEVEL": "error",
    }
    if serving.queue is not None:
        told["MOSEC_CAPACITY"] = str(serving.queue)
    return told


PEERS = {
    "fastapi": Peer("FastAPI with a batcher", "/score", _module("fastapi")),
    # The same with batches of one request: FastAPI itself has no others.
    "fastapi_alone": Peer("FastAPI alone", "/score", _module("fastapi")),
    "litserve": Peer("LitServe", "/score", _module("litserve")),
    "bentoml": Peer("BentoML", "/score", _bentoml, lambda _: {"BENTOML_DO_NOT_TRACK": "True"}),
    "mosec": Peer("Mosec", "/inference", _module("mosec"), _mosec_environment),
}


def _haproxy(serving: Serving) -> dict[str, str]:
    """Ray Serve's documented variables, so that HAProxy gives up no request that it can resend."""
    assert serving.folder is not None
    folder = Path(serving.folder)
    told = {
        "CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "SOCKET_PATH": str(folder / "admin.sock"),
        "SERVER_STATE_BASE": str(folder),
        "SERVER_STATE_FILE": str(folder / "server-state"),
        "METRICS_ENABLED": "0",
        "METRICS_PORT": str(free_port()),
        "STATS_PORT": str(free_port()),
        # The default resends only what no replica got. Ranking may run twice.
        "RETRY_ON": "conn-failure empty-response response-timeout",
        "RETRIES": "3",
        # HAProxy resends what fits here; the default of 16 KiB holds less than most requests.
        "TUNE_BUFSIZE": str(1 << 18),
        # In place of no limit and of 5 s: what a replica that stands still holds goes to another.
        "TIMEOUT_SERVER_S": "1",
        "HEALTH_CHECK_INTER": "250ms",
    }
    return {
        **_RAY,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        **{f"RAY_SERVE_HAPROXY_{name}": value for name, value in told.items()},
    }


_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A replica that fails its checks is killed at once, in place of asked to end.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
#: Servers that replace workers which die, as software with two workers.
REPLACING = {
    "rayserve": Peer(
        "Ray Serve", "/score", _module("rayserve"), lambda _: _RAY, health="/-/healthz"
    ),
    "rayserve_haproxy": Peer(
        "Ray Serve with HAProxy", "/score", _module("rayserve"), _haproxy, health="/-/healthz"
    ),
    "mlserver": Peer("MLServer", "/score", _module("mlserver"), health="/v2/health/ready"),
}


@contextmanager
def running(name: str, serving: Serving, cores: str = str(SERVER_CORE)) -> Iterator[Service]:
    """Runs a peer, all of it on `cores`, until it answers and as long as the context lasts.

    Raises:
        RuntimeError: it ends before it answers, or does not in time; with its output.
    """
    peer = {**PEERS, **REPLACING}[name]
    request = peer.encode(next(traffic.requests(1, serving.rows)))
    environment = {
        "OMP_NUM_THREADS": "1",
        **serving.environment(),
        **peer.environment(serving),
    }
    is_ready = functools.partial(_answers, serving.port, request)
    with started(peer.command(serving), is_ready, environment, cores) as processes:
        yield Service(f"http://127.0.0.1:{serving.port}{peer.path}", processes)


def _answers(port: int, request: bytes) -> bool:
    """Whether a request gets status 200."""
    response = Response()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.sendall(request)
            while True:
                piece = connection.recv(1 << 16)
                if not piece or response.add(piece):
                    return response.status == 200
    except (OSError, ValueError):
        return False
