"""gloo's threads of a channel do not preempt others, and a process ends after all of them."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.transport import gloo_threads
from torchrec_bls.collective.transport.gloo_threads import loop_threads, stop_preempting


def policies_with_a_channel(rank: int) -> tuple[list[int], list[int], int]:
    """Returns the policies of gloo's threads from before, and of those that a channel adds, and
    what arrives."""
    dist.barrier()
    before = loop_threads()
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024) as channel:
        channel.post([[torch.tensor([7], dtype=torch.uint8)]] * dist.get_world_size())
        with channel.wait() as arrival:
            arrived = int(arrival.tensor(1 - rank)[0])
        old, new = (
            [os.sched_getscheduler(thread) for thread in threads]
            for threads in (before, loop_threads() - before)
        )
        dist.barrier()
    return old, new, arrived


@pytest.mark.parametrize("transport", ["c10d"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_threads_of_a_channel_and_of_the_callers_group() -> None:
    for old, new, arrived in run(2, policies_with_a_channel):
        assert old and set(old) == {os.sched_getscheduler(0)}
        assert new and set(new) == {os.SCHED_BATCH}
        assert arrived == 7


def test_threads_that_have_ended_or_chose_a_policy_are_left_alone() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    found: list[int] = []

    def idle() -> None:
        own = threading.get_native_id()
        os.sched_setscheduler(own, os.SCHED_IDLE, os.sched_param(0))
        stop_preempting({own, ended.native_id or own})
        found.append(os.sched_getscheduler(own))

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]
    assert not loop_threads() & {threading.get_native_id()}


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
with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024, transport="c10d"):
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
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    monkeypatch.setattr(
        gloo_threads,
        "time",
        SimpleNamespace(
            monotonic=lambda: clock[0],
            monotonic_ns=lambda: int(clock[0] * 1e9),
            sleep=lambda _: look(),
        ),
    )
    gloo_threads._let_calls_end()
    assert not list(looks)
