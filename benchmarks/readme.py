"""Writes the results of README.md, tables and figures, from the records in benchmarks/results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import alltoall_report
import delays_report
import embedding_report
import sharding_report
from common import ROOT

BEGIN = "<!-- results: written by benchmarks/readme.py -->"
END = "<!-- end of results -->"
RECORDS = (
    "delays",
    "embedding",
    "backend",
    "alltoall",
    "codecs",
    "codec_exchange",
    "sharding_executed",
    "sharding_search",
)
_DELAY_PARTS = ("sleep", "forward", "heterogeneous", "dlrm")
_SIZES = {8: "8 B", 4096: "4 KiB", 32768: "32 KiB", 262144: "256 KiB", 4194304: "4 MiB"}

Record = dict[str, Any]


class ResultsError(Exception):
    """A record or the README cannot be used; the text says what to run."""


def load(folder: Path, benchmark: str) -> Record:
    """Reads the record of one benchmark.

    Raises:
        ResultsError: it is missing, of another benchmark or incomplete.
    """
    path = folder / f"{benchmark}.json"
    command = f"python benchmarks/{benchmark}.py --json {path}"
    try:
        record: Record = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResultsError(f"{path} is missing: write it with `{command}`") from None
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path} is no JSON ({error}): write it with `{command}`") from None
    if record.get("benchmark") != benchmark or not record.get("results"):
        raise ResultsError(f"{path} holds no results of {benchmark}: write it with `{command}`")
    if benchmark == "delays" and (
        missing := [part for part in _DELAY_PARTS if part not in record["results"]]
    ):
        raise ResultsError(f"{path} lacks the parts {missing}: write it with `{command}`")
    return record


def section(records: dict[str, Record]) -> str:
    """The text between the markers."""
    parts = [_delays(records["delays"]), _embedding(records["embedding"])]
    parts += [_backend(records["backend"]), _alltoall(records["alltoall"])]
    parts += [_codecs(records["codecs"], records["codec_exchange"])]
    parts += [_sharding(records["sharding_executed"], records["sharding_search"])]
    parts += [_losses(records)]
    return "\n\n".join(parts)


def fill(readme: str, text: str) -> str:
    """Puts `text` between the markers of `readme`.

    Raises:
        ResultsError: the markers are not there, once each and in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ResultsError(f"README.md needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def draw(folder: Path, records: dict[str, Record]) -> None:
    """Draws the figures that the section shows."""
    delays, alltoall = records["delays"], records["alltoall"]
    delays_report.plot(folder / "delays.png", delays["environment"], delays["results"])
    embedding_report.write_plot(folder / "embedding.png", records["embedding"]["results"])
    alltoall_report.plot(folder / "alltoall.png", alltoall["environment"], alltoall["results"])


def _delays(record: Record) -> str:
    rows = []
    for entry in record["results"]["sleep"]:
        times, ratio = entry["ms_per_step"], entry["ratio"]
        cells = [f"{times['ideal']['median']:.2f}"]
        for name in ("channel", "gloo"):
            percent = 100 * (ratio[name]["median"] - 1)
            cells.append(f"{times[name]['median']:.2f} ({percent:+.1f} %)")
        rows.append([str(entry["ranks"]), str(entry["bound"]), *cells])
    dlrm = []
    for part, setting in (("dlrm", "delays 0-10 ms"), ("heterogeneous", "1-100 ids a table")):
        for entry in record["results"][part]:
            bounded = entry["bound"] is not None
            dlrm.append(
                [
                    setting,
                    entry["name"],
                    _spread(entry["ms_per_step"]),
                    f"{entry['ideal_ms']:.2f}" if bounded else "",
                    f"{100 * entry['wait_share']:.0f} %" if bounded else "",
                ]
            )
    lines = [
        "### Random delays",
        "",
        "Each rank is late by a random 0 to 10 ms before every exchange; the dense part is a "
        "sleep. The ideal is the same run with an exchange that costs nothing and keeps the bound; "
        "in parentheses what each exchange adds to it. ms per step:",
        "",
        *_table(["ranks", "bound k", "ideal", "BoundedLagChannel", "gloo with a window"], rows),
        "",
        f"A whole DLRM with real compute, 4 ranks on {record['environment']['cores']} cores: under "
        "delays, and with an uneven number of ids per table instead.",
        "",
        *_table(["setting", "", "ms per step [lowest-highest]", "ideal", "waiting"], dlrm),
        "",
        "![Step time by bound](docs/figures/delays.png)",
        "",
        _origin(record),
    ]
    return "\n".join(lines)


def _embedding(record: Record) -> str:
    rows = []
    for result in record["results"]:
        times = {name: spread["median"] for name, spread in result["ms"].items()}
        rows.append(
            [
                _case(result),
                str(result["ranks"]),
                str(result["batch"]),
                f"{times['torchrec']:.2f}",
                f"{times['ours']:.2f}",
                f"{times['torchrec'] / times['ours']:.1f}",
                f"{times['ours'] / times['lookup']:.1f}",
            ]
        )
    header = ["module", "ranks", "batch", "TorchRec on gloo", "bound 0", "speed-up", "/ lookup"]
    lines = [
        "### Sharded embedding modules",
        "",
        "Forward of 26 tables of 20,000 rows, dimension 64, one id per feature, one thread a rank. "
        "The last column compares with the lookup alone, which no exchange can beat. ms:",
        "",
        *_table(header, rows),
        "",
        "![Forward times](docs/figures/embedding.png)",
        "",
        _origin(record),
    ]
    return "\n".join(lines)


def _backend(record: Record) -> str:
    rows = []
    for result in record["results"]["torchrec"]:
        gloo, bls, free = (result[name]["median"] for name in ("gloo", "bls", "free"))
        rows.append(
            [
                _case(result),
                str(result["ranks"]),
                f"{gloo:.2f}",
                f"{bls:.2f}",
                f"{gloo / bls:.1f}",
                f"{gloo / free:.1f}",
            ]
        )
    calls = [cell for cell in record["results"]["alltoall"] if cell["ranks"] == 2]
    small = [_times_faster(cell) for cell in calls if cell["size"] <= 32768]
    lines = [
        "### Unmodified TorchRec over the backend bls",
        "",
        f"The same modules, TorchRec's own sharders, {record['results']['torchrec'][0]['batch']} "
        "samples a rank: the group's backend is all that differs. The last column is what a "
        "backend could gain that moves rows in no time. ms:",
        "",
        *_table(["module", "ranks", "gloo", "bls", "speed-up", "at most"], rows),
        "",
        f"`all_to_all_single` alone, 2 ranks, up to 32 KiB per pair: {min(small):.0f} to "
        f"{max(small):.0f} times faster than gloo.",
        "",
        _origin(record),
    ]
    return "\n".join(lines)


def _alltoall(record: Record) -> str:
    cells = {(r["ranks"], r["bytes_per_pair"], r["mode"]): r["peers"] for r in record["results"]}
    rows = []
    for ranks, size in dict.fromkeys((ranks, size) for ranks, size, _ in cells):
        row = [str(ranks), _SIZES.get(size, f"{size} B")]
        for peer in ("raw", "channel", "open_mpi", "channel_python", "gloo"):
            modes = (cells.get((ranks, size, mode), {}) for mode in ("one_shot", "train"))
            row.append(" / ".join(_microseconds(peers.get(peer)) for peers in modes))
        rows.append(row)
    header = ["ranks", "per pair", "raw limit", "channel, C++", "Open MPI"]
    lines = [
        "### All-to-all alone",
        "",
        "Single calls / back to back, µs per call. The raw limit is a copy into shared memory and "
        "a flag, with no header and no checks ([how it is measured](benchmarks/README.md)).",
        "",
        *_table([*header, "channel, Python", "gloo"], rows),
        "",
        "![All-to-all times](docs/figures/alltoall.png)",
        "",
        _origin(record),
    ]
    return "\n".join(lines)


def _codecs(speeds: Record, exchange: Record) -> str:
    cells = {(c["network"], c["dim"], c["codec"]): c for c in exchange["results"]}
    rows = []
    for (network, dim, codec), cell in cells.items():
        plain, median = cells[network, dim, "fp32"], cell["ms"]["median"]
        rows.append(
            [
                network,
                str(dim),
                codec,
                f"{cell['bytes'] / 1e6:.2f}",
                f"{plain['bytes'] / cell['bytes']:.2f}",
                f"{median:.2f}",
                f"{plain['ms']['median'] / median:.2f}",
            ]
        )
    lines = [
        "### Encoded rows",
        "",
        "GB of float32 a second, one thread, [2048, 26 x 64] as rows of 64 or 1664; in parentheses "
        "how many times FBGEMM's row-wise operators, which keep less of small rows. memcpy: "
        f"{_memcpy(speeds):.1f}.",
        "",
        *_table(["bits", "row", "encode", "decode"], _codec_speeds(speeds)),
        "",
        _origin(speeds),
        "",
        "The output dist of 26 tables among 4 ranks, 512 samples each, over shared memory and over "
        'a network that passes 1 Gbit/s in all (`transport="c10d"`):',
        "",
        *_table(["network", "dim", "codec", "MB", "times fewer", "ms", "times faster"], rows),
        "",
        _origin(exchange),
    ]
    return "\n".join(lines)


def _memcpy(record: Record) -> float:
    median: float = next(
        cell["gb_per_s"]["median"] for cell in record["results"] if cell["peer"] == "memcpy"
    )
    return median


def _speeds(record: Record) -> dict[tuple[int, int, str, str], float]:
    return {
        (cell["bits"], cell["columns"], cell["direction"], cell["peer"]): cell["gb_per_s"]["median"]
        for cell in record["results"]
        if cell["peer"] != "memcpy"
    }


def _codec_speeds(record: Record) -> list[list[str]]:
    speed = _speeds(record)
    rows = []
    for bits, columns in dict.fromkeys(key[:2] for key in speed):
        row = [str(bits), str(columns)]
        for direction in ("encode", "decode"):
            ours, theirs = (speed[bits, columns, direction, peer] for peer in ("ours", "FBGEMM"))
            row.append(f"{ours:.1f} ({ours / theirs:.2f})")
        rows.append(row)
    return rows


def _sharding(executed: Record, search: Record) -> str:
    models = _models(executed)
    planners = [name for name in models["bls"][0]["plans"] if name != sharding_report.OURS]
    times = []
    for planner in planners:
        cells = [sharding_report.over_ours(models[backend], planner) for backend in models]
        times.append([planner, *(f"{mid:.2f} ({low:.2f}-{high:.2f})" for low, mid, high in cells)])
    sizes = dict.fromkeys((r["tables"], r["ranks"]) for r in search["results"])
    planned = []
    for tables, ranks in sizes:
        row = [f"{tables} x {ranks}"]
        for planner in ("ours", "torchrec"):
            problem = {"tables": tables, "ranks": ranks, "planner": planner}
            runs = [r for r in search["results"] if problem.items() <= r.items()]
            over = [100 * r["over_bound"] for r in runs if "over_bound" in r]
            row.append(_range([r["seconds"] for r in runs], 1))
            row.append(f"{_range(over, 1)} %" if over else "")
            row[-1] += f" ({len(runs) - len(over)} of {len(runs)} none)" * (len(over) < len(runs))
        planned.append(row)
    lines = [
        "### Planned shardings",
        "",
        f"Training steps of {len(models['bls'])} random models of 8 to 20 tables at "
        f"{executed['settings']['ranks']} ranks: time under plans of TorchRec's planner, of "
        "random options and of the six simple planners of the performance-modelling paper over the "
        "time under ours, with 95 % intervals ([more](docs/reproduction/performance-models.md)).",
        "",
        *_table(["plans of", *(f"sharders on {backend}" for backend in models)], times),
        "",
        _origin(executed),
        "",
        "Planning on one core: seconds, and the predicted step over a proven lower bound.",
        "",
        *_table(["tables x ranks", "ours, s", "over", "TorchRec, s", "over"], planned),
        "",
        _origin(search),
    ]
    return "\n".join(lines)


def _models(executed: Record) -> dict[str, list[dict[str, Any]]]:
    backends = sorted({result["backend"] for result in executed["results"]})
    return {b: [r for r in executed["results"] if r["backend"] == b] for b in backends}


def _range(numbers: list[float], digits: int) -> str:
    low, high = (f"{each:.{digits}f}" for each in (min(numbers), max(numbers)))
    return low if low == high else f"{low}-{high}"


def _losses(records: dict[str, Record]) -> str:
    found = (_lost_delays, _lost_cells, _lost_calls, _lost_codecs, _lost_plans)
    lost = [line for losses in found for line in losses(records)]
    lines = ["### Where a peer was faster", ""]
    return "\n".join(lines + ([f"- {line}" for line in lost] or ["In none of these cells."]))


def _lost_calls(records: dict[str, Record]) -> Iterator[str]:
    results = records["backend"]["results"]
    for cell in results["alltoall"]:
        if _times_faster(cell) < 1:
            size, mode = _SIZES.get(cell["size"], f"{cell['size']} B"), cell["mode"]
            yield f"backend, {mode.replace('_', '-')}, {cell['ranks']} ranks, {size}: gloo"
    for result in results["torchrec"]:
        if _times_faster(result) < 1:
            yield f"unmodified TorchRec, {_case(result)}, {result['ranks']} ranks: gloo"


def _times_faster(cell: dict[str, Any]) -> float:
    times: float = cell["gloo"]["median"] / cell["bls"]["median"]
    return times


def _case(result: dict[str, Any]) -> str:
    return f"{result['module']} {result['sharding'].replace('_', '-')}"


def _lost_delays(records: dict[str, Record]) -> Iterator[str]:
    results = records["delays"]["results"]
    for entry in results["sleep"]:
        if entry["ratio"]["channel"]["median"] > entry["ratio"]["gloo"]["median"]:
            yield f"delays, {entry['ranks']} ranks, bound {entry['bound']}: gloo with a window"
    for entry in results["forward"]:
        if entry["ratio"]["ours"]["median"] > 1:
            yield f"delays, sharded module, {entry['ranks']} ranks: TorchRec on gloo"
    for part in ("dlrm", "heterogeneous"):
        theirs = next(entry for entry in results[part] if entry["bound"] is None)
        for entry in results[part]:
            if entry["ms_per_step"]["median"] > theirs["ms_per_step"]["median"]:
                yield f"DLRM ({part}), {entry['name']}: {theirs['name']}"


def _lost_cells(records: dict[str, Record]) -> Iterator[str]:
    for result in records["embedding"]["results"]:
        if result["ms"]["ours"]["median"] > result["ms"]["torchrec"]["median"]:
            where = f"{_case(result)}, {result['ranks']} ranks, batch {result['batch']}"
            yield f"{where}: TorchRec on gloo"
    rivals = (("channel", "open_mpi", "Open MPI"), ("channel_python", "gloo", "gloo"))
    for result in records["alltoall"]["results"]:
        peers = result["peers"]
        for ours, theirs, name in rivals:
            if theirs in peers and _median(peers[ours]) > _median(peers[theirs]):
                size = _SIZES.get(result["bytes_per_pair"], f"{result['bytes_per_pair']} B")
                mode = result["mode"].replace("_", "-")
                yield f"all-to-all, {mode}, {result['ranks']} ranks, {size}: {name}"


def _lost_codecs(records: dict[str, Record]) -> Iterator[str]:
    cells = _speeds(records["codecs"])
    for (bits, columns, direction, peer), speed in cells.items():
        if peer == "FBGEMM" and speed > cells[bits, columns, direction, "ours"]:
            yield f"{direction} {bits} bits, rows of {columns}: FBGEMM"
    times = {
        (c["network"], c["dim"], c["codec"]): c["ms"]["median"]
        for c in records["codec_exchange"]["results"]
    }
    for (network, dim, codec), median in times.items():
        if median > times[network, dim, "fp32"]:
            yield f"output dist, {network}, dimension {dim}, {codec}: float32"


def _lost_plans(records: dict[str, Record]) -> Iterator[str]:
    for backend, models in _models(records["sharding_executed"]).items():
        for planner in models[0]["plans"]:
            if sharding_report.over_ours(models, planner)[1] < 1:
                yield f"plans, sharders on {backend}: {planner}"


def _median(peer: dict[str, Any]) -> float:
    median: float = peer["us_per_call"]["median"]
    return median


def _microseconds(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return "-"
    median = _median(peer)
    return f"{median:,.{2 if median < 10 else 1 if median < 100 else 0}f}"


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} [{times['min']:.2f}-{times['max']:.2f}]"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _origin(record: Record) -> str:
    where = record["environment"]
    return (
        f"*{where['cpu']}, {where['cores']} cores, load {where['load_average']} before the run, "
        f"Linux {where['kernel']}, torch {where['versions']['torch']}, commit {where['commit']}, "
        f"{where['date'][:10]}: `{where['command']}`*"
    )


def main() -> int:
    """Rewrites the README's results and its figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    try:
        records = {name: load(options.results, name) for name in RECORDS}
        text = fill(options.readme.read_text(), section(records))
    except ResultsError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    draw(options.figures, records)
    options.readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
