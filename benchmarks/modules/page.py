"""Tables and figure of sharded modules, and of unmodified TorchRec over the backend."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import page

Record = dict[str, Any]

_STYLES = {
    "torchrec": ("TorchRec on gloo", "tab:gray"),
    "ours": ("bounded lag, bound 0", "tab:blue"),
    "lookup": ("lookup alone", "tab:green"),
}


def section(record: Record) -> str:
    """Forward times beside TorchRec's and the lookup's."""
    rows = []
    for result in record["results"]:
        theirs, ours, lookup = (result["ms"][name]["median"] for name in _STYLES)
        times = [f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.1f}", f"{ours / lookup:.1f}"]
        rows.append([page.case(result), str(result["ranks"]), str(result["batch"]), *times])
    header = ["module", "ranks", "batch", "TorchRec on gloo", "bound 0", "speed-up", "/ lookup"]
    tables = ["Forward, ms, median:", page.table(header, rows), page.conditions(record)]
    return "\n\n".join([*tables, page.faster_peers(_faster(record["results"]))])


def _faster(results: list[dict[str, Any]]) -> Iterator[str]:
    for result in results:
        if result["ms"]["ours"]["median"] > result["ms"]["torchrec"]["median"]:
            where = f"{result['ranks']} ranks, batch {result['batch']}"
            yield f"{page.case(result)}, {where}: TorchRec on gloo"


def plot(path: Path, record: Record) -> None:
    """Draws the forward times of each case side by side."""
    results = record["results"]
    labels = [f"{page.case(r)}, {r['ranks']} ranks, batch {r['batch']}" for r in results]
    with page.figure(path, 9, 0.45 * len(results) + 1.5) as (_, ((axis,),)):
        for row, (name, (label, colour)) in enumerate(_STYLES.items()):
            places = [index + 0.27 * (row - 1) for index in range(len(results))]
            medians = [r["ms"][name]["median"] for r in results]
            axis.barh(places, medians, height=0.25, label=label, color=colour)
        axis.set_yticks(range(len(results)), labels)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("forward, ms (median of the slowest rank)")
        axis.legend()


def backend_section(record: Record) -> str:
    """TorchRec over both backends, all-to-alls over both, and where gloo was faster."""
    results = record["results"]
    modules = []
    for result in results["torchrec"]:
        gloo, bls, free = (result[name]["median"] for name in ("gloo", "bls", "free"))
        times = [f"{gloo:.2f}", f"{bls:.2f}", f"{gloo / bls:.1f}", f"{gloo / free:.1f}"]
        modules.append([page.case(result), str(result["ranks"]), *times])
    calls = []
    for cell in results["alltoall"]:
        gloo, bls = (f"{cell[name]['median']:,.1f}" for name in ("gloo", "bls"))
        where = [str(cell["ranks"]), page.size(cell["size"]), _mode(cell)]
        calls.append([*where, gloo, bls, f"{_times_faster(cell):.1f}"])
    pair = [cell for cell in results["alltoall"] if cell["ranks"] == 2]
    small = [_times_faster(cell) for cell in pair if cell["size"] <= 32768]
    return "\n\n".join(
        [
            f"Forward of unmodified TorchRec, {results['torchrec'][0]['batch']} samples a rank, "
            "ms; the last column is the speed-up if moving rows were free:",
            page.table(["module", "ranks", "gloo", "bls", "speed-up", "at most"], modules),
            f"`all_to_all_single` alone, 2 ranks, up to 32 KiB per pair: {min(small):.0f} to "
            f"{max(small):.0f} times faster than gloo. µs per call:",
            page.table(["ranks", "per pair", "", "gloo", "bls", "speed-up"], calls),
            page.conditions(record),
            page.faster_peers(_gloo_faster(results)),
        ]
    )


def _gloo_faster(results: Record) -> Iterator[str]:
    for cell in results["alltoall"]:
        if _times_faster(cell) < 1:
            where = f"{cell['ranks']} ranks, {page.size(cell['size'])}"
            yield f"backend, {_mode(cell)}, {where}: gloo"
    for result in results["torchrec"]:
        if _times_faster(result) < 1:
            yield f"unmodified TorchRec, {page.case(result)}, {result['ranks']} ranks: gloo"


def _mode(cell: dict[str, Any]) -> str:
    return {"one_shot": "single calls", "train": "back to back"}[cell["mode"]]


def _times_faster(cell: dict[str, Any]) -> float:
    times: float = cell["gloo"]["median"] / cell["bls"]["median"]
    return times
