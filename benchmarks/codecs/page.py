"""Tables of the codecs' speed, and of exchanges with them."""

from collections.abc import Iterator
from typing import Any

from benchmarks.harness import page

Record = dict[str, Any]


def section(record: Record) -> str:
    """Speeds beside FBGEMM's, and where FBGEMM was faster."""
    memcpy, *cells = record["results"]
    speed = {
        (cell["bits"], cell["columns"], cell["direction"], cell["peer"]): cell["gb_per_s"]["median"]
        for cell in cells
    }
    rows, faster = [], []
    for bits, columns in dict.fromkeys(key[:2] for key in speed):
        row = [str(bits), str(columns)]
        for direction in ("encode", "decode"):
            ours, theirs = (speed[bits, columns, direction, peer] for peer in ("ours", "FBGEMM"))
            row.append(f"{ours:.1f} ({ours / theirs:.2f})")
            if theirs > ours:
                faster.append(f"{direction} {bits} bits, rows of {columns}: FBGEMM")
        rows.append(row)
    return "\n\n".join(
        [
            "GB of float32 a second, one thread, median; in parentheses how many times FBGEMM's "
            f"row-wise operators. memcpy: {memcpy['gb_per_s']['median']:.1f}.",
            page.table(["bits", "row", "encode", "decode"], rows),
            page.conditions(record),
            page.faster_peers(faster),
        ]
    )


def exchange_section(record: Record) -> str:
    """Bytes and times of the exchanges beside float32's."""
    cells = {(c["network"], c["dim"], c["codec"]): c for c in record["results"]}
    header = ["network", "dim", "codec", "MB", "times fewer", "ms", "times faster"]
    rows = [_exchange(cells, key) for key in cells]
    tables = ["Slowest rank, median:", page.table(header, rows), page.conditions(record)]
    return "\n\n".join([*tables, page.faster_peers(_faster(cells))])


def _exchange(cells: Record, key: tuple[str, int, str]) -> list[str]:
    network, dim, codec = key
    cell, plain = cells[key], cells[network, dim, "fp32"]
    ms, before = cell["ms"]["median"], plain["ms"]["median"]
    sizes = [f"{cell['bytes'] / 1e6:.2f}", f"{plain['bytes'] / cell['bytes']:.2f}"]
    return [network, str(dim), codec, *sizes, f"{ms:.2f}", f"{before / ms:.2f}"]


def _faster(cells: Record) -> Iterator[str]:
    for (network, dim, codec), cell in cells.items():
        if cell["ms"]["median"] > cells[network, dim, "fp32"]["ms"]["median"]:
            yield f"output dist, {network}, dimension {dim}, {codec}: float32"
