"""Tables and figure of the delay benchmark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record

#: Cells of a table, and which peer was faster where, or "".
Row = tuple[list[Any], str]

_STYLES = {
    "ideal": {"label": "ideal: same delays, free exchange", "color": "tab:orange", "marker": "s"},
    "channel": {"label": "BoundedLagChannel", "color": "tab:blue"},
    "gloo": {"label": "gloo with a window", "color": "tab:green", "marker": "^"},
    "pipeline": {"label": "bounded-lag pipeline", "color": "tab:blue"},
}
_DLRM = {"dlrm": "delays 0-10 ms", "heterogeneous": "1-100 ids a table"}


def section(record: Record) -> str:
    """The tables of all parts that were measured, and where a peer was faster."""
    results = record["results"]
    tables = (
        (
            "Dense part as a sleep, ms per step; in parentheses over the measured ideal:",
            ["ranks", "bound k", "ideal", "BoundedLagChannel", "gloo with a window"],
            [_sleep(entry) for entry in results.get("sleep", [])],
        ),
        (
            "A sharded EmbeddingBagCollection at bound 0 under the same delays, ms per step:",
            ["ranks", "batch", "TorchRec on gloo", "bound 0", "ratio"],
            [_forward(entry) for entry in results.get("forward", [])],
        ),
        (
            "A whole DLRM with real compute, 4 ranks:",
            ["setting", "", "ms per step [lowest-highest]", "ideal", "waiting"],
            [row for part in _DLRM for row in _dlrm(part, results.get(part, []))],
        ),
    )
    parts, faster = [], []
    for title, header, rows in tables:
        if rows:
            parts += [title, page.table(header, [cells for cells, _ in rows])]
            faster += [peer for _, peer in rows if peer]
    return page.section(record, *parts, faster=faster)


def _sleep(entry: Record) -> Row:
    ranks, bound = entry["ranks"], entry["bound"]
    times, ratio = entry["ms_per_step"], entry["ratio"]
    cells = [ranks, bound, f"{times['ideal']['median']:.2f}"]
    for name in ("channel", "gloo"):
        percent = 100 * (ratio[name]["median"] - 1)
        cells.append(f"{times[name]['median']:.2f} ({percent:+.1f} %)")
    slower = any(of["channel"]["median"] > of["gloo"]["median"] for of in (ratio, times))
    peer = f"delays, {ranks} ranks, bound {bound}: gloo with a window" if slower else ""
    return cells, peer


def _forward(entry: Record) -> Row:
    times = (page.median_and_range(entry["ms_per_step"][name]) for name in ("torchrec", "ours"))
    ranks, ratio = entry["ranks"], entry["ratio"]["ours"]["median"]
    peer = f"delays, sharded module, {ranks} ranks: TorchRec on gloo" if ratio > 1 else ""
    return [ranks, entry["batch"], *times, f"{ratio:.2f}"], peer


def _dlrm(part: str, entries: list[Record]) -> Iterator[Row]:
    for entry in entries:
        cells = [_DLRM[part], entry["name"], page.median_and_range(entry["ms_per_step"]), "", ""]
        if entry["bound"] is not None:
            cells[3:] = f"{entry['ideal_ms']:.2f}", f"{100 * entry['wait_share']:.0f} %"
        theirs = entries[0]  # TorchRec's
        slower = entry["ms_per_step"]["median"] > theirs["ms_per_step"]["median"]
        yield cells, f"DLRM ({part}), {entry['name']}: {theirs['name']}" if slower else ""


def plot(path: Path, record: Record) -> None:
    """Step time against the bound, as Fig. 7 of the BLS paper; one panel a setting."""
    results = record["results"]
    counts = sorted({entry["ranks"] for entry in results["sleep"]})
    columns = len(counts) + len(_DLRM)
    with page.figure(path, 4.4 * columns, 4, ncols=columns) as (figure, ((*axes,),)):
        for axis, count in zip(axes, counts, strict=False):
            axis.set_title(f"dense part as a sleep, delays 0-10 ms, {count} ranks", fontsize=9)
            entries = [entry for entry in results["sleep"] if entry["ranks"] == count]
            times = {entry["bound"]: entry["ms_per_step"] for entry in entries}
            page.curves_by_bound(axis, times, _STYLES, "ms per step")
        for axis, (part, title) in zip(axes[len(counts) :], _DLRM.items(), strict=True):
            axis.set_title(f"DLRM, {title}, 4 ranks", fontsize=9)
            times = {}
            unbounded = [entry for entry in results[part] if entry["bound"] is None]
            for entry, color in zip(unbounded, ("tab:gray", "tab:green"), strict=False):
                line = entry["ms_per_step"]["median"]
                axis.axhline(line, color=color, linestyle=":", label=entry["name"])
            for entry in (entry for entry in results[part] if entry["bound"] is not None):
                ideal = dict.fromkeys(("median", "min", "max"), entry["ideal_ms"])
                times[entry["bound"]] = {"ideal": ideal, "pipeline": entry["ms_per_step"]}
            page.curves_by_bound(axis, times, _STYLES, "ms per step")
        for axis in axes:
            axis.legend(fontsize=8, loc="lower left")
        figure.suptitle(page.host(record), fontsize=10)
