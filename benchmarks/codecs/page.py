"""Tables of the codecs' speed, and of exchanges with them."""

from benchmarks.harness import page
from benchmarks.harness.record import Record


def section(record: Record) -> str:
    """Speeds beside FBGEMM's, and where FBGEMM was faster."""
    memcpy, *cells = record["results"]
    speed = {
        (cell["bits"], cell["columns"], cell["direction"], cell["peer"]): cell["gb_per_s"]["median"]
        for cell in cells
    }
    rows, faster = [], []
    for bits, columns in dict.fromkeys(key[:2] for key in speed):
        rows.append([bits, columns])
        for direction in ("encode", "decode"):
            ours, theirs = (speed[bits, columns, direction, peer] for peer in ("ours", "FBGEMM"))
            rows[-1].append(f"{ours:.1f} ({ours / theirs:.2f})")
            if theirs > ours:
                faster.append(f"{direction} {bits} bits, rows of {columns}: FBGEMM")
    return page.section(
        record,
        "GB of float32 a second, one thread, median; in parentheses how many times FBGEMM's "
        f"row-wise operators. memcpy: {memcpy['gb_per_s']['median']:.1f}.",
        page.table(["bits", "row", "encode", "decode"], rows),
        faster=faster,
    )


def exchange_section(record: Record) -> str:
    """Bytes and times of the exchanges beside float32's."""
    cells = {(c["network"], c["dim"], c["codec"]): c for c in record["results"]}
    rows, faster = [], []
    for (network, dim, codec), cell in cells.items():
        plain = cells[network, dim, "fp32"]
        ms, before = cell["ms"]["median"], plain["ms"]["median"]
        sizes = [f"{cell['bytes'] / 1e6:.2f}", f"{plain['bytes'] / cell['bytes']:.2f}"]
        rows.append([network, dim, codec, *sizes, f"{ms:.2f}", f"{before / ms:.2f}"])
        if ms > before:
            faster.append(f"output dist, {network}, dimension {dim}, {codec}: float32")
    header = ["network", "dim", "codec", "MB", "times fewer", "ms", "times faster"]
    return page.section(record, "Slowest rank, median:", page.table(header, rows), faster=faster)
