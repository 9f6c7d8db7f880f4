"""Tables and figure of sharded modules, and of unmodified TorchRec over the backend."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.exchange.page import MODES, medians
from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.modules.models import HOT_ROWS, Case


def section(record: Record) -> str:
    """Forward times beside TorchRec's over both backends, and the lookup's."""
    forwards, sums, faster = [], [], []
    for result in sorted(record["results"], key=place_of):
        times = {name: f"{ms['median']:.2f}" for name, ms in result["ms"].items()}
        inputs, speedup = inputs_of(result), interval(result["speedup"])
        if alone := result["ranks"] == 1:
            sums.append([*inputs, times["lookup"], times["ours"], speedup])
        else:
            peers = [times[name] for name in ("torchrec", "backend", "ours")]
            peers += [speedup, interval(result["over_lookup"])]
            forwards.append([module_of(result), result["ranks"], *inputs, *peers])
        if result["speedup"][2] < 1:
            faster.append(f"{_case(result)}: {'FBGEMM' if alone else 'TorchRec on gloo'}")
    of = ["batch", "ids", "rows", "dim"]
    peers = ["TorchRec on gloo", "over bls", "bound 0", "speed-up", "/ lookup"]
    return page.section(
        record,
        "Forward, ms, median; ratios of medians with their 95 % intervals:",
        page.table(["module", "ranks", *of, *peers], forwards),
        "Sums of bags alone, on one rank without an exchange:",
        page.table([*of, "FBGEMM", "ours", "speed-up"], sums),
        faster=faster,
    )


def quantized_section(record: Record) -> str:
    """Forwards of quantized modules that are read directly, beside the whole module's."""
    rows, slower = [], []
    for result in record["results"]:
        over = result["over_unsharded"]
        name = f"{result['type'].upper()} {result['module']}"
        rows.append(
            [
                *(name, result["batch"], result["ids"]),
                *(f"{result['ms'][each]['median']:.3f}" for each in ("unsharded", *over)),
                *(interval(ratio) for ratio in over.values()),
            ]
        )
        slower += [
            f"- {name}, batch {result['batch']}, ids {result['ids']}, {sharding.replace('_', '-')}"
            for sharding, ratio in over.items()
            if ratio[0] > 1
        ]
    times = ["unsharded", "table-wise", "row-wise"]
    ratios = ["table-wise / unsharded", "row-wise / unsharded"]
    return page.section(
        record,
        f"Forward of 2 ranks, each with its own batch, ms, median: 26 tables of "
        f"{record['settings']['rows']:,} rows, dimension 64, ids that were not looked up before. "
        "The unsharded module is TorchRec's, with all tables on each rank. Ratios of medians "
        "with 95 % intervals:",
        page.table(["module", "batch", "ids", *times, *ratios], rows),
        "The unsharded module is faster, by the whole interval, than:",
        "\n".join(slower or ["- none of these"]),
    )


def speedups(record: Record) -> dict[int, list[float]]:
    """How many times faster than TorchRec on gloo each forward is, by the number of ranks."""
    of_ranks = defaultdict(list)
    for result in _forwards(record):
        of_ranks[result["ranks"]].append(result["speedup"][1])
    return of_ranks


def tracking_section(record: Record) -> str:
    """Forwards in training that note their ids, and that do not."""
    rows = []
    for result in record["results"]:
        row = [module_of(result), result["ranks"], result["batch"]]
        for name in ("ours", "torchrec"):
            row += [
                f"{result['ms'][f'{name} nothing']['median']:.2f}",
                *(
                    interval(result["ratios"][f"{name} {way}"])
                    for way in ("DeltaWriter", "tracker")
                ),
            ]
        rows.append(row)
    header = ["module", "ranks", "batch", "ours", "with DeltaWriter", "with the tracker alone"]
    header += ["TorchRec", "with DeltaWriter", "with the tracker alone"]
    return page.section(
        record,
        "Forward in training, ms, median, one id a feature and sample. With a DeltaWriter and with "
        "TorchRec's tracker in the forward: multiples of it, ratios of medians with 95 % "
        "intervals:",
        page.table(header, rows),
    )


def plot(path: Path, record: Record, label: str) -> None:
    """Draws the speed-ups of each module and number of ranks on a line, by the size of batches."""
    lines = defaultdict(list)
    for result in sorted(_forwards(record), key=place_of):
        lines[f"{module_of(result)}, {result['ranks']} ranks"].append(result)
    with page.figure(path, 8, 0.27 * len(lines) + 1.4) as (_, ((axis,),)):
        for (least, most), color in _BATCHES.items():
            points = [
                (result["speedup"][1], place)
                for place, results in enumerate(lines.values())
                for result in results
                if least <= result["batch"] <= most
            ]
            axis.scatter(*zip(*points, strict=True), s=14, color=color, label=f"{least} to {most}")
        axis.set_yticks(range(len(lines)), lines, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.5)
        axis.grid(axis="x", alpha=0.3)
        axis.set(xscale="log", xlabel=label)
        axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axis.xaxis.set_minor_formatter("")
        axis.legend(title="batch", fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


_BATCHES = {(1, 8): "tab:blue", (64, 256): "tab:green", (512, 2048): "tab:orange"}


def _forwards(record: Record) -> list[Record]:
    return [result for result in record["results"] if result["ranks"] > 1]


def place_of(result: Record) -> list[Any]:
    names = ("module", "sharding", "ranks", "rows", "pooling", "dim", "ids", "lengths", "batch")
    return [{**Case._field_defaults, **result}[name] for name in names]


def interval(ratio: list[float]) -> str:
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def inputs_of(result: Record) -> list[Any]:
    result = {**Case._field_defaults, **result}
    kind = result["lengths"] if result["pooling"] == "sum" else result["pooling"]
    ids = f"{result['ids']}" if kind == "fixed" else f"{result['ids']} {kind}"
    return [result["batch"], ids, "hot" if result["rows"] == HOT_ROWS else "cold", result["dim"]]


def backend_section(record: Record, exchanges: Record | None = None) -> str:
    """TorchRec over both backends, all-to-alls over both, and where a peer was faster.

    `exchanges` is the record of all-to-alls alone, which has Open MPI's times.
    """
    results = record["results"]
    of_mpi = over_mpi(record, exchanges) if exchanges else {}
    modules, calls, faster = [], [], []
    for cell in results["alltoall"]:
        gloo, bls = (cell[name]["median"] for name in ("gloo", "bls"))
        ranks, size, mode = cell["ranks"], page.size(cell["size"]), MODES[cell["mode"]]
        over = of_mpi.get((ranks, cell["size"], cell["mode"]))
        mpi = ["-", "-"] if over is None else [f"{bls / over:,.1f}", f"{over:.2f}"]
        calls.append([ranks, size, mode, f"{gloo:,.1f}", f"{bls:,.1f}", f"{gloo / bls:.1f}", *mpi])
        if gloo < bls:
            faster.append(f"backend, {mode}, {ranks} ranks, {size}: gloo")
    for mode, title in MODES.items():
        for count in dict.fromkeys(ranks for ranks, *_ in of_mpi):
            slower = [
                page.size(size)
                for (ranks, size, of), over in of_mpi.items()
                if (ranks, of) == (count, mode) and over > 1
            ]
            if slower:
                cells = f"backend, {title}, {count} ranks, {', '.join(slower)}"
                faster.append(f"{cells}: Open MPI, called from C")
    for result in results["torchrec"]:
        gloo, bls, free = (result[name]["median"] for name in ("gloo", "bls", "free"))
        module, ranks = module_of(result), result["ranks"]
        times = [f"{gloo:.2f}", f"{bls:.2f}", f"{gloo / bls:.1f}", f"{gloo / free:.1f}"]
        modules.append([module, ranks, *times])
        if gloo < bls:
            faster.append(f"unmodified TorchRec, {module}, {ranks} ranks: gloo")
    peers = ["gloo", "bls", "gloo / bls", "Open MPI, C", "bls / Open MPI"]
    return page.section(
        record,
        f"Forward of unmodified TorchRec, {results['torchrec'][0]['batch']} samples a rank, "
        "ms; the last column is the speed-up if moving rows were free:",
        page.table(["module", "ranks", "gloo", "bls", "speed-up", "at most"], modules),
        "`all_to_all_single` alone, µs per call. Open MPI's times are of [another "
        "record](exchange.md), of the same cells and barrier:",
        page.table(["ranks", "per pair", "", *peers], calls),
        faster=faster,
    )


def over_mpi(record: Record, exchanges: Record) -> dict[tuple[int, int, str], float]:
    """How many times Open MPI's time the backend bls takes, by ranks, bytes per pair and mode."""
    of_mpi = {key: us["open_mpi"] for key, us in medians(exchanges).items() if "open_mpi" in us}
    cells = ((c["ranks"], c["size"], c["mode"], c["bls"]) for c in record["results"]["alltoall"])
    return {
        (ranks, size, mode): us["median"] / of_mpi[ranks, size, mode]
        for ranks, size, mode, us in cells
        if (ranks, size, mode) in of_mpi
    }


def module_of(result: Record) -> str:
    return f"{result['module']} {result['sharding'].replace('_', '-')}"


def _case(result: Record) -> str:
    batch, ids, rows, dim = inputs_of(result)
    where = f"{module_of(result)}, {result['ranks']} ranks, batch {batch}"
    return f"{where}, {ids} ids, dim {dim}, {rows}"
