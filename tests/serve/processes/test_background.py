"""What is prepared in the background gives way, and nothing else does."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from torchrec_bls.serve.processes.background import give_way


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_gives_way_alone() -> None:
    before = _niceness()
    with ThreadPoolExecutor(1, initializer=give_way) as own:
        assert own.submit(_niceness).result() == max(before, 10)
    assert _niceness() == before


def test_who_has_given_way_more_stays_there() -> None:
    program = (
        f"import os; from {give_way.__module__} import give_way; give_way(); print(os.nice(0))"
    )
    niced = ["nice", "-n", "19", sys.executable, "-c", program]
    assert subprocess.run(niced, check=True, capture_output=True, text=True).stdout == "19\n"
