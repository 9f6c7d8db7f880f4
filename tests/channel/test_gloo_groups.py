"""A process ends after the threads of its gloo groups, and a forked child without them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchrec_bls.collective import gloo_groups

ENDS_BEHIND_A_CALL = """
import mmap, os, sys, time
import torch, torch.distributed as dist
import torchrec_bls

path = os.path.join(sys.argv[1], "store")
gathered = mmap.mmap(-1, 1)  # to look at it does not let go of Python's lock
rank = 1 - bool(os.fork())
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
group = dist.group.WORLD
if rank == 1:
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1))
    gathered[0] = 1
    os.read(0, 1)  # until the other one has ended
    os._exit(0)
sys.setswitchinterval(1000)
dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), async_op=True)
end = time.monotonic() + 60
while not gathered[0] and time.monotonic() < end:
    pass
assert gathered[0], "the other rank did not gather within 60 s"
end = time.monotonic() + 0.5  # until gloo's thread waits for Python's lock
while time.monotonic() < end:
    pass
"""


def test_a_process_may_end_while_gloos_thread_waits_for_pythons_lock(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS_BEHIND_A_CALL)
    with subprocess.Popen([sys.executable, script, tmp_path], stdin=subprocess.PIPE) as process:
        try:
            assert process.wait(120) == 0
        finally:
            process.kill()


CHILD_OF_A_GROUP = """
import os, sys
import torch.distributed as dist
from torchrec_bls import BoundedLagChannel

def end_of_a_child():
    child = os.fork()
    if child == 0:
        sys.exit()
    return os.waitpid(child, 0)[1]

path = os.path.join(sys.argv[1], "store")
other = os.fork()
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=bool(other), world_size=2)
ends = [end_of_a_child()]
with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024, transport="tcp"):
    ends.append(end_of_a_child())
    dist.barrier()
if other:
    ends.append(os.waitpid(other, 0)[1])
assert not any(ends), ends
"""


def test_a_forked_child_ends_that_has_none_of_gloos_threads(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD_OF_A_GROUP)
    process = subprocess.Popen([sys.executable, script, tmp_path], start_new_session=True)
    try:
        assert process.wait(120) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_end_of_a_process_waits_for_a_thread_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [0.0]
    looks = iter(["R", "S", "S", "S"])
    switches = iter([7, 7, 8, 8])
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("pt_gloo_runloop\n")

    def look() -> None:
        (tmp_path / "1" / "status").write_text(
            f"State:\t{next(looks)} (x)\nvoluntary_ctxt_switches:\t{next(switches)}\n"
        )
        clock[0] += 0.01

    look()
    monkeypatch.setattr(gloo_groups, "_THREADS", tmp_path)
    monkeypatch.setattr(
        gloo_groups,
        "time",
        SimpleNamespace(
            monotonic=lambda: clock[0],
            monotonic_ns=lambda: int(clock[0] * 1e9),
            sleep=lambda _: look(),
        ),
    )
    gloo_groups.let_calls_end()
    assert not list(looks)
