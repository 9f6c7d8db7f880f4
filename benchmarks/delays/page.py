"""Tables and figure of the delay benchmark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import page

Record = dict[str, Any]

_PEERS = {
    "ideal": {"label": "ideal: same delays, free exchange", "color": "tab:orange", "marker": "s"},
    "channel": {"label": "BoundedLagChannel", "color": "tab:blue"},
    "gloo": {"label": "gloo with a window", "color": "tab:green", "marker": "^"},
}
_DLRM = {"dlrm": "delays 0-10 ms", "heterogeneous": "1-100 ids a table"}


def section(record: Record) -> str:
    """The tables of all parts that were measured, and where a peer was faster."""
    results = record["results"]
    parts = []
    if "sleep" in results:
        parts += [
            "Dense part as a sleep, ms per step; in parentheses over the measured ideal:",
            page.table(
                ["ranks", "bound k", "ideal", "BoundedLagChannel", "gloo with a window"],
                [_sleep(entry) for entry in results["sleep"]],
            ),
        ]
    if "forward" in results:
        parts += [
            "A sharded EmbeddingBagCollection at bound 0 under the same delays, ms per step:",
            page.table(
                ["ranks", "batch", "TorchRec on gloo", "bound 0", "ratio"],
                [_forward(entry) for entry in results["forward"]],
            ),
        ]
    if rows := [row for part in _DLRM if part in results for row in _dlrm(part, results[part])]:
        header = ["setting", "", "ms per step [lowest-highest]", "ideal", "waiting"]
        parts += ["A whole DLRM with real compute, 4 ranks:", page.table(header, rows)]
    return "\n\n".join([*parts, page.conditions(record), page.faster_peers(_faster(results))])


def _sleep(entry: dict[str, Any]) -> list[str]:
    times, ratio = entry["ms_per_step"], entry["ratio"]
    cells = [str(entry["ranks"]), str(entry["bound"]), f"{times['ideal']['median']:.2f}"]
    for name in ("channel", "gloo"):
        percent = 100 * (ratio[name]["median"] - 1)
        cells.append(f"{times[name]['median']:.2f} ({percent:+.1f} %)")
    return cells


def _forward(entry: dict[str, Any]) -> list[str]:
    times = (page.median_and_range(entry["ms_per_step"][name]) for name in ("torchrec", "ours"))
    ratio = f"{entry['ratio']['ours']['median']:.2f}"
    return [str(entry["ranks"]), str(entry["batch"]), *times, ratio]


def _dlrm(part: str, entries: list[dict[str, Any]]) -> Iterator[list[str]]:
    for entry in entries:
        ideal = waiting = ""
        if entry["bound"] is not None:
            ideal, waiting = f"{entry['ideal_ms']:.2f}", f"{100 * entry['wait_share']:.0f} %"
        times = page.median_and_range(entry["ms_per_step"])
        yield [_DLRM[part], entry["name"], times, ideal, waiting]


def _faster(results: Record) -> Iterator[str]:
    for entry in results.get("sleep", []):
        if entry["ratio"]["channel"]["median"] > entry["ratio"]["gloo"]["median"]:
            yield f"delays, {entry['ranks']} ranks, bound {entry['bound']}: gloo with a window"
    for entry in results.get("forward", []):
        if entry["ratio"]["ours"]["median"] > 1:
            yield f"delays, sharded module, {entry['ranks']} ranks: TorchRec on gloo"
    for part in _DLRM:
        theirs = next((e for e in results.get(part, []) if e["bound"] is None), None)
        for entry in results.get(part, []):
            if theirs and entry["ms_per_step"]["median"] > theirs["ms_per_step"]["median"]:
                yield f"DLRM ({part}), {entry['name']}: {theirs['name']}"


def plot(path: Path, record: Record) -> None:
    """Step time against the bound, as Fig. 7 of the BLS paper; one panel a setting."""
    results = record["results"]
    counts = sorted({entry["ranks"] for entry in results["sleep"]})
    columns = len(counts) + len(_DLRM)
    with page.figure(path, 4.4 * columns, 4, ncols=columns) as (figure, ((*axes,),)):
        for axis, count in zip(axes, counts, strict=False):
            entries = [entry for entry in results["sleep"] if entry["ranks"] == count]
            for name, style in _PEERS.items():
                page.curve(axis, enumerate(e["ms_per_step"][name] for e in entries), **style)
            page.bound_axis(axis, [entry["bound"] for entry in entries], "ms per step")
            axis.set_title(f"dense part as a sleep, delays 0-10 ms, {count} ranks", fontsize=9)
        for axis, (part, title) in zip(axes[len(counts) :], _DLRM.items(), strict=True):
            theirs, *bounded = results[part]
            line = theirs["ms_per_step"]["median"]
            axis.axhline(line, color="tab:gray", linestyle=":", label="TorchRec on gloo")
            ideal = [
                dict.fromkeys(("median", "min", "max"), entry["ideal_ms"]) for entry in bounded
            ]
            page.curve(axis, enumerate(ideal), **_PEERS["ideal"])
            style = {**_PEERS["channel"], "label": "bounded-lag pipeline"}
            page.curve(axis, enumerate(entry["ms_per_step"] for entry in bounded), **style)
            page.bound_axis(axis, [entry["bound"] for entry in bounded], "ms per step")
            axis.set_title(f"DLRM, {title}, 4 ranks", fontsize=9)
        for axis in axes:
            axis.legend(fontsize=8, loc="lower left")
        where = record["environment"]
        figure.suptitle(f"{where['cpu']}, {where['cores']} cores", fontsize=10)
