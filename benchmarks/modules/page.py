"""Tables and figure of sharded modules, and of unmodified TorchRec over the backend."""

from pathlib import Path

from benchmarks.exchange.page import MODES
from benchmarks.harness import page
from benchmarks.harness.record import Record

_STYLES = {
    "torchrec": ("TorchRec on gloo", "tab:gray"),
    "ours": ("bounded lag, bound 0", "tab:blue"),
    "lookup": ("lookup alone", "tab:green"),
}


def section(record: Record) -> str:
    """Forward times beside TorchRec's and the lookup's."""
    rows, faster = [], []
    for result in record["results"]:
        theirs, ours, lookup = (result["ms"][name]["median"] for name in _STYLES)
        where = [_module(result), result["ranks"], result["batch"]]
        times = [f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.1f}", f"{ours / lookup:.1f}"]
        rows.append([*where, *times])
        if ours > theirs:
            faster.append(f"{_case(result)}: TorchRec on gloo")
    header = ["module", "ranks", "batch", "TorchRec on gloo", "bound 0", "speed-up", "/ lookup"]
    return page.section(record, "Forward, ms, median:", page.table(header, rows), faster=faster)


def plot(path: Path, record: Record) -> None:
    """Draws the forward times of each case side by side."""
    results = record["results"]
    with page.figure(path, 9, 0.45 * len(results) + 1.5) as (_, ((axis,),)):
        for row, (name, (label, colour)) in enumerate(_STYLES.items()):
            places = [index + 0.27 * (row - 1) for index in range(len(results))]
            medians = [result["ms"][name]["median"] for result in results]
            axis.barh(places, medians, height=0.25, label=label, color=colour)
        axis.set_yticks(range(len(results)), map(_case, results))
        axis.invert_yaxis()
        axis.set(xscale="log", xlabel="forward, ms (median of the slowest rank)")
        axis.legend()


def backend_section(record: Record) -> str:
    """TorchRec over both backends, all-to-alls over both, and where gloo was faster."""
    results = record["results"]
    modules, calls, small, faster = [], [], [], []
    for cell in results["alltoall"]:
        gloo, bls = (cell[name]["median"] for name in ("gloo", "bls"))
        ranks, size, mode = cell["ranks"], page.size(cell["size"]), MODES[cell["mode"]]
        calls.append([ranks, size, mode, f"{gloo:,.1f}", f"{bls:,.1f}", f"{gloo / bls:.1f}"])
        if gloo < bls:
            faster.append(f"backend, {mode}, {ranks} ranks, {size}: gloo")
        if ranks == 2 and cell["size"] <= 32768:
            small.append(gloo / bls)
    for result in results["torchrec"]:
        gloo, bls, free = (result[name]["median"] for name in ("gloo", "bls", "free"))
        module, ranks = _module(result), result["ranks"]
        times = [f"{gloo:.2f}", f"{bls:.2f}", f"{gloo / bls:.1f}", f"{gloo / free:.1f}"]
        modules.append([module, ranks, *times])
        if gloo < bls:
            faster.append(f"unmodified TorchRec, {module}, {ranks} ranks: gloo")
    return page.section(
        record,
        f"Forward of unmodified TorchRec, {results['torchrec'][0]['batch']} samples a rank, "
        "ms; the last column is the speed-up if moving rows were free:",
        page.table(["module", "ranks", "gloo", "bls", "speed-up", "at most"], modules),
        f"`all_to_all_single` alone, 2 ranks, up to 32 KiB per pair: {min(small):.0f} to "
        f"{max(small):.0f} times faster than gloo. µs per call:",
        page.table(["ranks", "per pair", "", "gloo", "bls", "speed-up"], calls),
        faster=faster,
    )


def _module(result: Record) -> str:
    """A module and how it is sharded."""
    return f"{result['module']} {result['sharding'].replace('_', '-')}"


def _case(result: Record) -> str:
    return f"{_module(result)}, {result['ranks']} ranks, batch {result['batch']}"
