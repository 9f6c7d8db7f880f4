"""Work in a process of its own, whose time and memory nothing else has a part in."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# What the process may take to start, and what it may take after its timed part.
_AROUND_SECONDS = 120.0


def in_a_process(
    work: Callable[..., None], arguments: tuple[Any, ...], seconds: float
) -> dict[str, Any]:
    """Returns what a process of its own finds out, or as "failure" what became of it.

    Args:
        work: is given a connection and `arguments`. It sends an empty dict before and after what
            may take `seconds`, and its result at the end.
        arguments: the others.
        seconds: after which the process is ended.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_errors, args=(work, sending, *arguments))
    process.start()
    sending.close()  # else nobody would notice that the process died
    answer: dict[str, Any] = {}
    try:
        for limit in (_AROUND_SECONDS, seconds, _AROUND_SECONDS):
            if not receiving.poll(limit):
                return {"seconds": seconds, "failure": f"no result in {limit:.0f} s"}
            answer = json.loads(receiving.recv_bytes())
            if answer:
                break
        return answer
    except EOFError:
        process.join(_AROUND_SECONDS)
        return {"seconds": 0.0, "failure": f"died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send_errors(work: Callable[..., None], answer: Connection, *arguments: Any) -> None:
    start = time.perf_counter()
    try:
        work(answer, *arguments)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        record = {"seconds": time.perf_counter() - start, "failure": failure}
        answer.send_bytes(json.dumps(record).encode())
