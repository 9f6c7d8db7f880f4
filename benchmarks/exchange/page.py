"""Table and figure of the all-to-all benchmark."""

from itertools import product
from pathlib import Path

from benchmarks.harness import page
from benchmarks.harness.record import Record

_STYLES = {
    "raw": {"label": "raw limit", "linestyle": "--"},
    "channel": {"label": "channel, C++"},
    "open_mpi": {"label": "Open MPI"},
    "channel_python": {"label": "channel, Python"},
    "gloo": {"label": "gloo"},
}
MODES = {"one_shot": "single calls", "train": "back to back"}
_RIVALS = (
    ("channel", "open_mpi", "Open MPI"),
    ("channel_python", "gloo", "gloo"),
    ("channel_python", "open_mpi", "Open MPI, called from C, than the channel from Python"),
)


def medians(record: Record) -> dict[tuple[int, int, str], dict[str, float]]:
    """Microseconds per call by peer, of each number of ranks, bytes per pair and mode."""
    return {
        (result["ranks"], result["bytes_per_pair"], result["mode"]): {
            name: peer["us_per_call"]["median"] for name, peer in result["peers"].items()
        }
        for result in record["results"]
    }


def section(record: Record) -> str:
    """All cells, and those in which a peer was faster."""
    cells = medians(record)
    rows = []
    for ranks, size in dict.fromkeys(key[:2] for key in cells):
        modes = [cells.get((ranks, size, mode), {}) for mode in MODES]
        times = (" / ".join(_rounded(us.get(name)) for us in modes) for name in _STYLES)
        rows.append([ranks, page.size(size), *times])
    return page.section(
        record,
        "Single calls / back to back, µs per call: slowest rank, median over the calls, then "
        "over the turns.",
        page.table(["ranks", "per pair", *(style["label"] for style in _STYLES.values())], rows),
        faster=[
            f"{MODES[mode]}, {ranks} ranks, {page.size(size)}: {name}"
            for (ranks, size, mode), us in cells.items()
            for ours, theirs, name in _RIVALS
            if ours in us and theirs in us and us[ours] > us[theirs]
        ],
    )


def plot(path: Path, record: Record) -> None:
    """One panel per mode and number of ranks: time per call over size, log-log."""
    results = record["results"]
    ranks = sorted({result["ranks"] for result in results})
    grid = {"nrows": len(MODES), "ncols": len(ranks), "sharex": True}
    with page.figure(path, 4 * len(ranks), 7, **grid) as (figure, axes):
        for axis, (mode, count) in zip(axes.flat, product(MODES, ranks), strict=True):
            cells = {}
            for r in results:
                if (r["mode"], r["ranks"]) == (mode, count):
                    us = {n: r["peers"][n]["us_per_call"] for n in _STYLES if n in r["peers"]}
                    cells[r["bytes_per_pair"]] = us
            page.curves(axis, cells.items(), _STYLES)
            axis.set_xscale("log", base=2)
            axis.set(yscale="log", title=f"{MODES[mode]}, {count} ranks")
            axis.set_xticks(list(cells), map(page.size, cells), fontsize=8)
            axis.grid(alpha=0.3)
        for axis in axes[:, 0]:
            axis.set_ylabel("us per call")
        for axis in axes[-1]:
            axis.set_xlabel("per ordered pair of ranks")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"All-to-all-v on one host: {page.host(record)}")


def _rounded(us: float | None) -> str:
    return "-" if us is None else f"{us:,.{2 if us < 10 else 1 if us < 100 else 0}f}"
