"""A service that runs as a process of its own, and requests to it."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.direct.nodes import state_of, until

#: Seconds that anything may take that takes a tenth of it alone.
PATIENCE = 90.0
COMMAND = [sys.executable, str(Path(sys.executable).with_name("torchrec-bls")), "serve"]
HOST = "127.0.0.1"
Reply = tuple[int, dict[str, str], bytes]
JSON_TYPE = {"Content-Type": "application/json"}


class Running:
    """A service that runs.

    Args:
        process: its process.
        port: its port for HTTP.
        grpc_port: its port for gRPC.
        name: name of its model.
        log: file with what it has written.

    Attributes:
        process: see above.
        port: see above.
        grpc: its address for gRPC.
        name: see above.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", port: int, grpc_port: int, name: str, log: Path
    ) -> None:
        self.process = process
        self.port = port
        self.grpc = f"{HOST}:{grpc_port}"
        self.name = name
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def infer_path(self) -> str:
        return f"/v2/models/{self.name}/infer"

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Returns status, headers by names in lower case and body."""
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            return reply_of(connection.getresponse())

    def get(self, path: str) -> Any:
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def infer(self, request: Mapping[str, Any], path: str = "") -> tuple[int, Any]:
        """Returns status and the JSON of the reply."""
        body = json.dumps(request).encode()
        status, _, reply = self.request("POST", path or self.infer_path, body, JSON_TYPE)
        return status, json.loads(reply)

    def ready(self) -> bool:
        """Returns whether it says that it is ready."""
        try:
            return self.request("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def count(self, outcome: str) -> float:
        """Returns how many requests have ended in a way."""
        return self.metric(f'torchrec_bls_requests_total{{outcome="{outcome}"}}')

    def metric(self, name: str, of: Callable[[Sequence[float]], float] = sum) -> float:
        """Returns a metric of all workers, with its labels: "name" or 'name{label="value"}'; their
        sum, or what a function makes of their values."""
        name, _, labels = name.partition("{")
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        status, _, body = self.request("GET", "/metrics")
        assert status == 200, body
        found = [
            sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
            if sample.name == name and wanted.items() <= sample.labels.items()
        ]
        assert found, f"no {name} with {wanted}"
        return of(found)

    def connect(self) -> socket.socket:
        """Returns a connection for HTTP as bytes."""
        return socket.create_connection((HOST, self.port), timeout=PATIENCE)

    def named(self, name: str) -> list[int]:
        """Returns the numbers of its processes whose names begin so: "keeper", "zygote", "worker 1"
        or "front"."""
        wanted = "haproxy" if name == "front" else f"bls {name}"
        return [each for each in descendants(self.pid) if _name(each).startswith(wanted)]

    def only(self, name: str) -> int:
        """Returns the number of its one process that has a name."""
        [found] = self.named(name)
        return found

    def end(self) -> None:
        """Ends it as Ctrl-C does, and checks that it leaves no process."""
        processes = descendants(self.pid)
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0, self.log
        until(lambda: not any(is_alive(each) for each in processes))


def reply_of(response: http.client.HTTPResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, response.read()


@contextmanager
def running(
    folder: Path,
    *options: str,
    model: str = "tests.serve.ranker:build",
    environment: Mapping[str, str] | None = None,
    ports: Sequence[int] = (),
) -> Iterator[Running]:
    """Runs a service, and ends it.

    Args:
        folder: where it leaves its output and its temporary files.
        options: options of the command besides the model and the ports.
        model: where the function is that returns the model.
        environment: variables in addition to those of this process.
        ports: its ports for HTTP and gRPC; none: such as are free.
    """
    port, grpc_port = ports or free_ports(2)
    log = folder / "log.txt"
    at = ["--port", str(port), "--grpc-port", str(grpc_port)]
    temporary = folder / "tmp"
    temporary.mkdir()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, model, "--no-compile", *options, *at],
            stdout=file,
            stderr=file,
            env={**os.environ, "TMPDIR": str(temporary), **(environment or {})},
        )
    service = Running(process, port, grpc_port, model.partition(":")[0].rpartition(".")[2], log)
    try:
        until(lambda: process.poll() is not None or service.ready(), PATIENCE)
        assert process.poll() is None, service.log
        yield service
        if process.poll() is None:
            service.end()
            assert not list(temporary.iterdir())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def descendants(pid: int) -> list[int]:
    """Returns the numbers of all processes that a process has started, and these."""
    parents: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(each.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(each.parent.name))
    found = parents.get(pid, [])
    return [*found, *(deeper for each in found for deeper in descendants(each))]


def is_alive(pid: int) -> bool:
    return state_of(pid) not in "XZ"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() if is_alive(pid) else ""
    except OSError:
        return ""
