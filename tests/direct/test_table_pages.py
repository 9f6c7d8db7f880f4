"""Pages of tables at the end of a process, which would otherwise wait for all of them."""

import subprocess
import sys

PROGRAM = """
import os, re
from threading import Thread
from torchrec_bls import _native

def resident():
    smaps = open("/proc/self/smaps").read()
    return sum(map(int, re.findall(r"memfd:torchrec_bls.*?Rss: +([0-9]+) kB", smaps, re.S)))

label = (0, "1", bytes(32))
segment = _native.TableSegment.create(label, [], 64 << 20, False)
mapped = []

def map_beside_lookups():
    _native.work_beside_lookups()
    mapped.append(_native.TableWindow([(segment, 0, 64 << 20)]))
    mapped[-1].populate()

for end in (False, True):
    before = resident()
    if end:
        _native.end_work_beside_lookups()
    thread = Thread(target=map_beside_lookups)
    thread.start()
    thread.join()
    print(resident() - before)
"""


def test_a_thread_beside_lookups_leaves_pages_when_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    populated, left = map(int, done.stdout.split())
    assert populated >= 64 << 10
    assert left < 8 << 10
