"""Compares forwards that read tables directly, of this working tree and of another checkout."""

import itertools

from benchmarks.direct import latency, reads
from benchmarks.harness import commits
from benchmarks.harness.launch import on_ranks
from benchmarks.modules.commits import measure
from benchmarks.modules.models import Case

_FORWARDS = 300


def _latencies() -> commits.Turn:
    """Single forwards of small batches, through DistributedModelParallel."""
    found: commits.Turn = {}
    for case in latency.cases():
        if case.rows == latency.COLD:
            of_case = on_ranks(case.ranks, latency.measure, case, _FORWARDS)
            label = f"{case.module} {case.sharding}, {case.ranks} ranks, {case.batch} alone"
            found |= {f"{label}, {name}": of_case[name] for name in ("median", "p90")}
    return found


def _cases() -> list[Case]:
    """A few back to back: cold rows of both modules, and long bags."""
    batches = (2048, 512, 64)
    usual = [
        Case(module, sharding, 2, batch, ids=ids, rows=reads.COLD)
        for module, sharding in itertools.product(("EC", "EBC"), ("table_wise", "row_wise"))
        for batch, ids in (*((batch, 1) for batch in batches), (512, 20))
        if (module, ids) != ("EC", 20)
    ]
    return sorted(usual, key=lambda case: (case.module, case.sharding, -case.batch * case.ids))


def _turn() -> commits.Turn:
    return _latencies() | on_ranks(2, measure, _cases(), {"lookup": "direct"})


if __name__ == "__main__":
    commits.main("direct.commits", _turn, str(__doc__), "ms")
