"""The service as a process on one core, with a checkpoint of the benchmark's model."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.serve.scheduling import family

#: Of the service, and of the generator.
SERVER_CORE, GENERATOR_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
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


@contextlib.contextmanager
def served(build: str, checkpoint: Path, *options: str) -> Iterator[Service]:
    """Serves the model that `benchmarks.serve.model` builds by this function, and ends it.

    Raises:
        RuntimeError: the service ends before it is ready, or is not ready in time; with its output.
    """
    port = _free_port()
    command = [
        *("taskset", "--cpu-list", str(SERVER_CORE)),
        *(str(Path(sys.executable).with_name("torchrec-bls")), "serve"),
        *(f"benchmarks.serve.model:{build}", "--checkpoint", str(checkpoint), "--name", MODEL),
        *("--port", str(port), "--grpc-port", "0", *options),
    ]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/v2/health/ready")
            url = f"http://127.0.0.1:{port}/v2/models/{MODEL}/infer"
            yield Service(url, family(process.pid))
        except _NotReadyError as error:
            output.seek(0)
            said = output.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{' '.join(command)} {error}:\n{said}") from None
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _NotReadyError(Exception):
    pass


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise _NotReadyError(f"ended with {process.returncode}")
        # A URLError is an OSError, and so is a status that says "not yet".
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise _NotReadyError(f"was not ready within {_READY_S:g} s")
