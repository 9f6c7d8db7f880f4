"""Tables of the peers: which batches suit them, and what they do beside the service."""

from statistics import median
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.serve import shape
from benchmarks.serve.peers.running import PEERS

#: The service in a comparison.
OURS = "ours"

_TITLES = {
    OURS: "torchrec-bls serve",
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
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in record["results"]:
        rounds.setdefault((each["tables"], each["server"]), []).append(each)
    rows, faster = [], []
    for (tables, server), of_server in rounds.items():
        first = of_server[0]
        capacities = [each["capacity"] for each in of_server]
        # Of a round each, since a machine changes its speed from one to the next.
        ratios = [
            each["capacity"] / ours["capacity"]
            for each, ours in zip(of_server, rounds[tables, OURS], strict=False)
        ]
        overload = {(load["of"], load["share"]): load for load in first["overload"]}
        loads = [overload.get(key) for key in (("ours", 1.5), ("ours", 3.0), ("own", 3.0))]
        rows.append(
            [
                tables,
                _TITLES[server],
                _median(capacities, ".0f"),
                _median(ratios, ".2f"),
                *map(_answers, loads),
                f"{(first['pss_bytes'] - first['pss_without_tables_bytes']) / 2**20:.0f}",
            ]
        )
        if median(ratios) > 1:
            faster.append(f"{tables}: {_TITLES[server]} has {_median(ratios, '.2f')} times ours")
    header = [
        *("tables", "server", "capacity", "of ours"),
        *("at 150 % of ours", "at 300 % of ours", "at 300 % of its own"),
        "tables, MiB",
    ]
    return page.section(
        record,
        "Capacity: requests/s of which 99 % are answered within "
        f"{1000 * shape.DEADLINE_S:g} ms, the median and range of several rounds; as a share of "
        "the service's, of the same round. In overload: answers in time a second, and in brackets "
        "the late share of all answers. Memory: Pss of all processes, less that with tables of "
        f"{shape.QUICK_ROWS:,} rows:",
        page.table(header, rows),
        faster=faster,
    )


def _median(figures: list[float], form: str) -> str:
    """The median of several rounds, and their range."""
    text = format(median(figures), form)
    if len(figures) > 1:
        text += f" ({min(figures):{form}} to {max(figures):{form}})"
    return text


def _answers(load: dict[str, Any] | None) -> str:
    if load is None:
        return ""
    return f"{load['in_time_rate']:.0f} ({100 * load['late_share']:.1f} %)"
