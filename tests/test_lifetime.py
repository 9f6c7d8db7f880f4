"""The end of a process in its phases, and forked children, each in a process of its own."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.direct.test_process import DEADLINE, succeeds_in_child
from torchrec_bls import lifetime
from torchrec_bls.lifetime import (
    Living,
    When,
    do_all,
    kept_from_children,
    new_lock,
    whole_at_forks,
)

# The module alone, as its first lines may say: it needs no other package, and no torch.
ALONE = f"""
import importlib.util, os, sys
found = importlib.util.spec_from_file_location("lifetime", {lifetime.__file__!r})
lifetime = importlib.util.module_from_spec(found)
found.loader.exec_module(lifetime)
When, at_exit, say = lifetime.When, lifetime.at_exit, lambda text: print(text, flush=True)
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script to the end of its process."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE + script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_phases_come_in_their_order_whatever_is_registered_first() -> None:
    script = """
for when in reversed(When):
    at_exit(when)(lambda text=when.name: say(text))
    at_exit(when)(lambda text=when.name: say(f"{text} again"))
import atexit
atexit.register(say, "handlers of the script")
"""
    order = ["OFFERS", "FOLLOWERS", "CHANNELS", "GLOO"]
    assert [phase.name for phase in When] == order
    each = [line for name in order for line in (name, f"{name} again")]
    assert ended(script).stdout.splitlines() == ["handlers of the script", *each]


def test_every_end_comes_and_every_error_is_shown() -> None:
    script = """
@at_exit(When.OFFERS)
def _():
    raise ValueError("of an offer")

@at_exit(When.CHANNELS)
def _():
    raise KeyboardInterrupt("in a channel")

at_exit(When.GLOO)(lambda: say("gloo"))
"""
    process = ended(script)
    assert process.stdout == "gloo\n"
    assert "ValueError: of an offer" in process.stderr
    assert "KeyboardInterrupt: in a channel" in process.stderr


def test_a_process_without_exit_handlers_gets_the_last_error() -> None:
    script = """
@at_exit(When.CHANNELS)
def _():
    raise ValueError("of a channel")

at_exit(When.GLOO)(lambda: say("gloo"))
try:
    lifetime.end_all()
except ValueError as error:
    say(error)
os._exit(0)
"""
    assert ended(script).stdout.splitlines() == ["gloo", "of a channel"]


def test_ends_come_before_multiprocessing_waits_for_children() -> None:
    script = """
from multiprocessing import util
util.Finalize(None, say, ["children"], exitpriority=0)
at_exit(When.GLOO)(lambda: say("gloo"))
"""
    assert ended(script).stdout.splitlines() == ["gloo", "children"]


def test_a_child_renews_all_whatever_one_raises() -> None:
    script = """
lock = lifetime.new_lock()
lock.acquire()

class Opened:
    def close(self):
        say(f"closed while the lock is {'held' if lock.locked() else 'free'}")
        raise OSError("of a file")

opened = lifetime.kept_from_children(Opened())

@lifetime.in_forked_child
def _():
    raise ValueError("of a channel")

lifetime.in_forked_child(lambda: say("renewed"))
child = os.fork()
if child == 0:
    say("child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say(f"parent's lock: {lock.locked()}")
"""
    process = ended(script)
    assert process.stdout.splitlines() == [
        "closed while the lock is free",
        "renewed",
        "child",
        "parent's lock: True",
    ]
    assert "OSError: of a file" in process.stderr
    assert "ValueError: of a channel" in process.stderr


def test_all_calls_are_made_and_the_last_error_has_the_others() -> None:
    made: list[int] = []

    def fail(number: int) -> None:
        made.append(number)
        raise ValueError(str(number))

    with pytest.raises(ValueError, match="3") as raised:
        do_all([lambda: fail(1), lambda: made.append(2), lambda: fail(3)])
    assert made == [1, 2, 3]
    assert str(raised.value.__context__) == "1"


class Thing:
    pass


def test_objects_are_not_kept_alive_and_may_be_added_meanwhile() -> None:
    things: Living[Thing] = Living()
    first, second = Thing(), Thing()
    things.add(first)
    things.add(second)
    seen = []
    for each in things:
        seen.append(each)
        things.add(Thing())
    assert {*seen} == {first, second}
    seen.clear()
    del first, each
    assert list(things) == [second]


def test_a_lock_of_another_thread_is_free_in_a_child() -> None:
    lock, held, leave = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            leave.wait(DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(DEADLINE)
    assert succeeds_in_child(lambda: lock.acquire(blocking=False))
    assert lock.locked()
    leave.set()
    thread.join()


def test_a_socket_ends_with_its_process() -> None:
    ours, theirs = socket.socketpair()
    kept_from_children(ours)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    theirs.settimeout(DEADLINE)
    ours.send(b"a")
    assert theirs.recv(1) == b"a"
    ours.close()
    assert theirs.recv(1) == b""
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
    theirs.close()


def test_a_fork_waits_for_what_another_thread_must_not_leave_unfinished() -> None:
    begun, leave, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with whole_at_forks():
            begun.set()
            leave.wait(DEADLINE)
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(DEADLINE)
    threading.Timer(0.1, leave.set).start()
    assert succeeds_in_child(done.is_set)
    thread.join()


def test_a_fork_does_not_wait_for_ever() -> None:
    begun, leave = threading.Event(), threading.Event()

    def work() -> None:
        with whole_at_forks():
            begun.set()
            leave.wait(DEADLINE)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(DEADLINE)
    assert succeeds_in_child(lambda: not leave.is_set())
    leave.set()
    thread.join()


@pytest.mark.full
def test_the_ends_of_the_package_stand_in_their_phases() -> None:
    script = """
import torchrec_bls
from torchrec_bls import lifetime, offer
for when, end in sorted(lifetime._ends, key=lambda each: each[0].value):
    print(when.name, end.__module__.removeprefix("torchrec_bls."))
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert process.stdout.splitlines() == [
        "OFFERS direct.offers.offer",
        "FOLLOWERS direct.gpu.registration",
        "FOLLOWERS direct.gpu.under_way",
        "FOLLOWERS direct.serving.follower",
        "FOLLOWERS direct.serving.side_pins",
        "CHANNELS collective.channel",
        "GLOO collective.gloo_groups",
    ]
