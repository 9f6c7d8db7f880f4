"""What a process without batches takes of a processor to follow new versions.

Its tables are as they were, or a version was announced whose tables are lost: their process has
ended, and nobody had mapped them. Other processes of the user hold many descriptors or few.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.direct.page import idle_section
from benchmarks.harness import record
from torchrec_bls import _native
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.direct.steps import content_of

FULL = {"seconds": 60.0, "descriptors": [0, 80_000]}
QUICK = {"seconds": 2.0, "descriptors": [0, 2_000]}

_OF_A_PROCESS = 10_000
_HOLD = """
import os, sys
for _ in range(int(sys.argv[1])): os.dup(0)
print(flush=True)
sys.stdin.read()
"""
_BYTES = 4096


@contextmanager
def _held(descriptors: int) -> Iterator[None]:
    """Has other processes hold that many descriptors."""
    counts = [
        min(_OF_A_PROCESS, descriptors - first) for first in range(0, descriptors, _OF_A_PROCESS)
    ]
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_raise_limit,
        )
        for count in counts
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stdout.read(1) == b"\n"
        yield
    finally:
        for holder in holders:
            holder.communicate(b"")


def _raise_limit() -> None:
    limit = _OF_A_PROCESS + 100
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, most)))


def _tables() -> tuple[FloatTables, OwnerPart]:
    """Returns a table of one owner, and its part of the first version."""
    layout = TableLayout("table", 16, 64, "FP32", (Shard(0, 0, 16, 0, 64),))
    digest = digest_of([layout])
    page = _native.ControlPage.create(1, digest)
    places = {("table", layout.shards[0]): 0}
    tables = FloatTables(page, digest, {"table": layout}, [_BYTES], False, places, torch.float32)
    part = tables.create(0, "1", content_of([]), None, {})
    page.record(0, 1, "1", part.index.address)
    page.announce(0, 1)
    return tables, part


def measure(seconds: float, lost: bool) -> float:
    """Returns the percentage of a processor that a follower takes."""
    tables, part = _tables()
    follower = Follower([tables], (tables.generation("1", 1, [part]),), settles=False)
    if lost:
        gone = tables.create(0, "2", content_of([]), None, {})
        tables.page.record(0, 2, "2", gone.index.address)
        del gone
        tables.page.announce(0, 2)
    time.sleep(seconds / 3)  # looks become rarer while nothing is new
    before, begin = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - before) / (time.monotonic() - begin)
    assert bool(follower.problem) == lost
    follower.stop()
    return 100 * share


def main() -> None:
    arguments = record.parser(__doc__, quick="2 s, few descriptors").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = []
    for descriptors in settings["descriptors"]:
        with _held(descriptors):
            for lost in (False, True):
                percent = measure(settings["seconds"], lost)
                of_case = {"descriptors": descriptors, "lost": lost, "percent": percent}
                results.append(of_case)
    record.publish(arguments.json, "direct_idle", before, settings, results, idle_section)


if __name__ == "__main__":
    main()
