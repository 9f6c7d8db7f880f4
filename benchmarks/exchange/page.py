"""Table and figure of the all-to-all benchmark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import page

Record = dict[str, Any]

_PEERS = {
    "raw": "raw limit",
    "channel": "channel, C++",
    "open_mpi": "Open MPI",
    "channel_python": "channel, Python",
    "gloo": "gloo",
}
_MODES = {"one_shot": "single calls", "train": "back to back"}
_RIVALS = (("channel", "open_mpi", "Open MPI"), ("channel_python", "gloo", "gloo"))


def section(record: Record) -> str:
    """All cells, and those in which a peer was faster."""
    results = record["results"]
    cells = {(r["ranks"], r["bytes_per_pair"], r["mode"]): r["peers"] for r in results}
    rows = []
    for ranks, size in dict.fromkeys((ranks, size) for ranks, size, _ in cells):
        row = [str(ranks), page.size(size)]
        for peer in _PEERS:
            modes = (cells.get((ranks, size, mode), {}) for mode in _MODES)
            row.append(" / ".join(_microseconds(peers.get(peer)) for peers in modes))
        rows.append(row)
    return "\n\n".join(
        [
            "Single calls / back to back, µs per call: slowest rank, median over the calls, then "
            "over the turns.",
            page.table(["ranks", "per pair", *_PEERS.values()], rows),
            page.conditions(record),
            page.faster_peers(_faster(results)),
        ]
    )


def plot(path: Path, record: Record) -> None:
    """One panel per mode and number of ranks: time per call over size, log-log."""
    results, where = record["results"], record["environment"]
    ranks = sorted({result["ranks"] for result in results})
    grid = {"nrows": len(_MODES), "ncols": len(ranks), "sharex": True}
    with page.figure(path, 4 * len(ranks), 7, **grid) as (figure, axes):
        for of_mode, (mode, title) in zip(axes, _MODES.items(), strict=True):
            for axis, count in zip(of_mode, ranks, strict=True):
                cells = [r for r in results if r["mode"] == mode and r["ranks"] == count]
                for peer, label in _PEERS.items():
                    known = [cell for cell in cells if peer in cell["peers"]]
                    points = [(c["bytes_per_pair"], c["peers"][peer]["us_per_call"]) for c in known]
                    if points:
                        line = "--" if peer == "raw" else "-"
                        page.curve(axis, points, label=label, linestyle=line)
                axis.set_xscale("log", base=2)
                axis.set(yscale="log", title=f"{title}, {count} ranks")
                sizes = [cell["bytes_per_pair"] for cell in cells]
                axis.set_xticks(sizes, [page.size(size) for size in sizes], fontsize=8)
                axis.grid(alpha=0.3)
            of_mode[0].set_ylabel("us per call")
        for axis in axes[-1]:
            axis.set_xlabel("per ordered pair of ranks")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"All-to-all-v on one host: {where['cpu']}, {where['cores']} cores")


def _faster(results: list[dict[str, Any]]) -> Iterator[str]:
    for result in results:
        peers = result["peers"]
        for ours, theirs, name in _RIVALS:
            if theirs in peers and _median(peers[ours]) > _median(peers[theirs]):
                where = f"{result['ranks']} ranks, {page.size(result['bytes_per_pair'])}"
                yield f"{_MODES[result['mode']]}, {where}: {name}"


def _median(peer: dict[str, Any]) -> float:
    median: float = peer["us_per_call"]["median"]
    return median


def _microseconds(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return "-"
    median = _median(peer)
    return f"{median:,.{2 if median < 10 else 1 if median < 100 else 0}f}"
