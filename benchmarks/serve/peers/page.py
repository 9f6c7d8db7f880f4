"""Tables of the peers: which batches suit them, and what they do beside the service."""

from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.serve import shape
from benchmarks.serve.peers.running import PEERS

#: The service in a comparison, and once more at its end, which shows what the machine does alone.
OURS, OURS_AGAIN = "ours", "ours again"

_TITLES = {
    OURS: "torchrec-bls serve",
    OURS_AGAIN: "torchrec-bls serve, again",
    **{name: peer.title for name, peer in PEERS.items()},
}


def grid_section(record: Record) -> str:
    """Capacities of each peer at the settings that were tried."""
    rows = []
    for name, peer in PEERS.items():
        tried = [each for each in record["results"] if each["peer"] == name]
        best = max((each["capacity"] for each in tried), default=0)
        for each in tried:
            wait = "" if each["wait_ms"] is None else f"{each['wait_ms']:g}"
            found = f"{each['capacity']:.0f}"
            is_best = each["capacity"] == best
            rows.append([peer.title, each["requests"], wait, f"**{found}**" if is_best else found])
    return page.section(
        record,
        "Capacity of peers by their settings, requests/s within 5 %, float tables; the highest "
        "is taken:",
        page.table(["peer", "requests of a batch, at most", "wait, ms", "capacity"], rows),
    )


def section(record: Record) -> str:
    """Capacity, answers in time in overload, and memory of tables of each server."""
    ours = {
        each["tables"]: each["capacity"] for each in record["results"] if each["server"] == OURS
    }
    rows, faster = [], []
    for each in record["results"]:
        ratio = each["capacity"] / ours[each["tables"]]
        overload = {(load["of"], load["share"]): load for load in each["overload"]}
        loads = [overload.get(key) for key in (("ours", 1.5), ("ours", 3.0), ("own", 3.0))]
        rows.append(
            [
                each["tables"],
                _TITLES[each["server"]],
                f"{each['capacity']:.0f}",
                f"{ratio:.2f}",
                *map(_answers, loads),
                f"{(each['pss_bytes'] - each['pss_without_tables_bytes']) / 2**20:.0f}",
            ]
        )
        if ratio > 1 and each["server"] not in (OURS, OURS_AGAIN):
            faster.append(f"{each['tables']}: {_TITLES[each['server']]} has {ratio:.2f} times ours")
    header = [
        *("tables", "server", "capacity", "of ours"),
        *("at 150 % of ours", "at 300 % of ours", "at 300 % of its own"),
        "tables, MiB",
    ]
    return page.section(
        record,
        "Capacity: requests/s of which 99 % are answered within "
        f"{1000 * shape.DEADLINE_S:g} ms. In overload: answers in time a second, and in brackets "
        "the late share of all answers. Memory: Pss of all processes, less that with tables of "
        f"{shape.QUICK_ROWS:,} rows:",
        page.table(header, rows),
        faster=faster,
    )


def _answers(load: dict[str, Any] | None) -> str:
    if load is None:
        return ""
    return f"{load['in_time_rate']:.0f} ({100 * load['late_share']:.1f} %)"
