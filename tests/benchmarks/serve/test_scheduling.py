"""CPU time and families of processes, as the kernel tells them."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.serve.scheduling import family, processor_s


def test_cpu_time_is_that_of_the_process() -> None:
    before, used = processor_s([os.getpid()]), time.process_time()
    while time.process_time() < used + 0.2:
        pass
    # Two ticks of the clock, and what this process did between the two readings.
    assert processor_s([os.getpid()]) - before == pytest.approx(0.2, abs=0.1)


def test_a_process_that_has_ended_counts_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert processor_s([child.pid]) == 0.0
    assert family(child.pid) == [child.pid]


def test_a_family_has_children_and_theirs() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert family(child.pid) == [child.pid, grandchild]
            assert set(family(os.getpid())) >= {os.getpid(), child.pid, grandchild}
        finally:
            os.kill(grandchild, 9)
            child.kill()
