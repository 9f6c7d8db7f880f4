"""The service as processes on one core or more, with a checkpoint of the benchmark's model."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.serve.generator import Load, open_inference
from benchmarks.serve.scheduling import family

#: Of the service, and of the generator.
SERVER_CORE, GENERATOR_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
#: Of a service with several workers.
CORES = f"{SERVER_CORE},{GENERATOR_CORE}"
MODEL = "dlrm"
_READY_S = 180.0
_END_S = 30.0


@dataclass(frozen=True)
class Service:
    """A service that is ready.

    Attributes:
        url: where it takes requests for inference.
        processes: all of its processes.
    """

    url: str
    processes: list[int]

    def load(self, rows: int, deadline_s: float) -> Load:
        """What a generator offers it, with ids of tables of so many rows."""
        encode = open_inference(self.url, deadline_s)
        return Load(self.url, encode, rows, GENERATOR_CORE, deadline_s, servers=self.processes)


@contextlib.contextmanager
def served(
    build: str,
    checkpoint: Path,
    *options: str,
    cores: str = str(SERVER_CORE),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Service]:
    """Serves the model that `benchmarks.serve.model` builds by this function, and ends it.

    Args:
        build: name of the function.
        checkpoint: path of its weights.
        options: options of the command.
        cores: cores that it may use, as taskset has them.
        environment: variables, besides those of this process.

    Raises:
        RuntimeError: the service ends before it is ready, or is not ready in time; with its output.
    """
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("torchrec-bls")), "serve"),
        *(f"benchmarks.serve.model:{build}", "--checkpoint", str(checkpoint), "--name", MODEL),
        *("--port", str(port), "--grpc-port", "0", *options),
    ]
    ready = f"http://127.0.0.1:{port}/v2/health/ready"
    with started(command, lambda: _answers(ready), environment, cores) as processes:
        yield Service(f"http://127.0.0.1:{port}/v2/models/{MODEL}/infer", processes)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    cores: str = str(SERVER_CORE),
) -> Iterator[list[int]]:
    """Runs a server until it is ready, and as long as the context lasts.

    Args:
        command: starts it.
        is_ready: whether it answers.
        environment: variables, besides those of this process.
        cores: cores that it may use, as taskset has them.

    Yields:
        All of its processes.

    Raises:
        RuntimeError: it ends before it is ready, or is not ready in time; with its output.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            # It ends with this process, however that ends.
            ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", cores, *command],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, is_ready)
            yield family(process.pid)
        except _NotReadyError as error:
            output.seek(0)
            said = output.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{shlex.join(command)} {error}:\n{said}") from None
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _answers(url: str) -> bool:
    # A URLError is an OSError, and so is a status that says "not yet".
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


class _NotReadyError(Exception):
    pass


def _wait_until_ready(process: "subprocess.Popen[bytes]", is_ready: Callable[[], bool]) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise _NotReadyError(f"ended with {process.returncode}")
        if is_ready():
            return
        time.sleep(0.1)
    raise _NotReadyError(f"was not ready within {_READY_S:g} s")
