"""Servers that are compared: how each is started, asked and stopped. This package's is one too."""

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from benchmarks import ROOT
from benchmarks.serve import encoding, traffic
from benchmarks.serve.generator import Encode, open_inference
from benchmarks.serve.peers import wire
from benchmarks.serve.peers.install import interpreter
from benchmarks.serve.peers.serving import Serving
from benchmarks.serve.responses import Response
from benchmarks.serve.scheduling import family

#: The core of a server with all its processes; the generator has the other one.
CORE = 0
_START_S, _STOP_S, _ANSWER_S = 180.0, 15.0, 2.0


@dataclass(frozen=True)
class Kind:
    """A server as software.

    Attributes:
        title: its name.
        path: of requests.
        command: starts it.
        environment: what it is told by variables.
        encoder: makes a request for an URL; picklable.
        decoder: returns the scores, [B], of a whole response with status 200.
    """

    title: str
    path: str
    command: Callable[[Serving], list[str]]
    environment: Callable[[Serving], dict[str, str]]
    encoder: Callable[[str], Encode]
    decoder: Callable[[bytes], npt.NDArray[np.float32]]


def _module(name: str) -> Callable[[Serving], list[str]]:
    return lambda _: [
        str(interpreter(name)), "-m", f"benchmarks.serve.peers.servers.with_{name}"
    ]  # fmt: skip


def _bentoml(serving: Serving) -> list[str]:
    serve = [str(interpreter("bentoml").with_name("bentoml")), "serve"]
    place = ["--host", "127.0.0.1", "--port", str(serving.port)]
    return [*serve, "benchmarks.serve.peers.servers.with_bentoml:Scores", *place]


def _mosec_environment(serving: Serving) -> dict[str, str]:
    queue = {} if serving.queue is None else {"MOSEC_CAPACITY": str(serving.queue)}
    return {
        **serving.environment(),
        "MOSEC_ADDRESS": "127.0.0.1",
        "MOSEC_PORT": str(serving.port),
        "MOSEC_TIMEOUT": str(serving.deadline_ms),
        "MOSEC_LOG_LEVEL": "error",
        **queue,
    }


def _bentoml_environment(serving: Serving) -> dict[str, str]:
    return {**serving.environment(), "BENTOML_DO_NOT_TRACK": "True"}


def _ours(serving: Serving) -> list[str]:
    quick = "_quick" if serving.rows != traffic.shape.ROWS else ""
    build = f"benchmarks.serve.model:build{quick}{'_int8' if serving.int8 else ''}"
    serve = [str(Path(sys.executable).with_name("torchrec-bls")), "serve", build]
    place = ["--port", str(serving.port), "--grpc-port", "0", "--name", "ranker"]
    deadline = ["--deadline-ms", str(serving.deadline_ms)]
    return [*serve, "--checkpoint", serving.checkpoint, *place, *deadline]


def _encoder(encode: Callable[..., bytes]) -> Callable[[str], Encode]:
    return lambda url: functools.partial(encode, path=urlsplit(url).path)


def _our_scores(response: bytes) -> npt.NDArray[np.float32]:
    return encoding.decode(response).scores


OURS = "ours"
_RAW: dict[str, Any] = {
    "environment": Serving.environment,
    "encoder": _encoder(wire.encode),
    "decoder": wire.scores_of,
}
KINDS = {
    OURS: Kind(
        "torchrec-bls serve",
        "/v2/models/ranker/infer",
        _ours,
        lambda _: {},
        open_inference,
        _our_scores,
    ),
    "fastapi": Kind("FastAPI", "/score", _module("fastapi"), **_RAW),
    "litserve": Kind("LitServe", "/score", _module("litserve"), **_RAW),
    "bentoml": Kind(
        "BentoML",
        "/score",
        _bentoml,
        _bentoml_environment,
        _encoder(wire.encode_pickled),
        wire.pickled_scores_of,
    ),
    "mosec": Kind(
        "Mosec",
        "/inference",
        _module("mosec"),
        **{**_RAW, "environment": _mosec_environment},
    ),
}
PEERS = [name for name in KINDS if name != OURS]


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        url: of requests.
        processes: all that it has.
    """

    url: str
    processes: list[int]


@contextmanager
def running(name: str, serving: Serving, core: int = CORE) -> Iterator[Running]:
    """Runs a server, all of it on one core, until it answers and as long as the context lasts.

    Raises:
        RuntimeError: it has ended, or answers nothing; the text has what it printed.
    """
    kind = KINDS[name]
    url = f"http://127.0.0.1:{serving.port}{kind.path}"
    request = kind.encoder(url)(next(traffic.requests(1, serving.rows)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **kind.environment(serving)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *kind.command(serving)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            last = time.monotonic() + _START_S
            while not _answers(serving.port, request):
                if process.poll() is not None or time.monotonic() > last:
                    output.seek(0)
                    printed = output.read()[-4000:].decode(errors="replace")
                    raise RuntimeError(f"{kind.title} does not answer at {url}: {printed}")
                time.sleep(0.2)
            yield Running(url, family(process.pid))
        finally:
            _stop(process)


def _answers(port: int, request: bytes) -> bool:
    """Whether a request gets status 200."""
    response = Response()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.sendall(request)
            while not response.add(connection.recv(1 << 16) or _gone()):
                pass
    except (OSError, ValueError):
        return False
    return response.status == 200


def _gone() -> bytes:
    raise ConnectionResetError


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and all that it has started, also what outlives it."""
    started = family(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        pass
    for each in started:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def pss_bytes(processes: list[int]) -> int:
    """Memory of processes: of pages that several share, each has a part."""
    kib = 0
    for process in processes:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        kib += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return kib * 1024
