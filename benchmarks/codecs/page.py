"""Tables of the codecs' speed, and of exchanges with them."""

from benchmarks.harness import page
from benchmarks.harness.record import Record

_MS_PER_BYTE = 8e3 / 1e9  # of a link
#: Networks whose links take no time worth mentioning.
_WITHOUT_LINKS = ("shared memory", "100 Gbit/s a rank")


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
    """Bytes and times beside float32's, and beside the least that bytes and computing allow."""
    cells = {(c["network"], c["part"], c["codec"]): c for c in record["results"]}
    rows, faster = [], []
    for (network, part, codec), cell in cells.items():
        plain = cells[network, part, "fp32"]
        ms, before = cell["ms"]["median"], plain["ms"]["median"]
        sizes = [f"{cell['bytes'] / 1e6:.2f}", f"{plain['bytes'] / cell['bytes']:.1f}"]
        limit = ""
        # The automatic choice has other codecs in each network.
        if network == "1 Gbit/s a rank" and codec != "auto":
            sending = cell["most_of_rank"] * _MS_PER_BYTE
            # A quick run has one of them.
            keys = ((each, part, codec) for each in _WITHOUT_LINKS)
            computing = (cells[key]["ms"]["median"] for key in keys if key in cells)
            limit = " / ".join(f"{(each + sending) / ms:.2f}" for each in computing)
        rows.append([network, part, codec, *sizes, f"{ms:.2f}", f"{before / ms:.2f}", limit])
        if ms > before:
            faster.append(f"{part}, {network}, {codec}: float32")
    header = ["network", "part", "codec", "MB", "times fewer", "ms", "times faster", "of the limit"]
    return page.section(
        record,
        "Slowest rank, median. The limit has each rank compute as over shared memory, or over the "
        "same transport with links of 100 Gbit/s, and send its bytes over its link:",
        page.table(header, rows),
        faster=faster,
    )


def bounded_section(record: Record) -> str:
    """Ratios and speeds by peer, and coders of symbols beside huff0."""
    parts, faster = [], []
    coders = []
    for cell in record["results"]:
        if "deviation" in cell:
            huff0, ours = cell["peers"]
            sizes = [f"{8 / huff0[1]:.2f}", f"{huff0[1] / ours[1]:.3f}"]
            coders.append([*sizes, f"{ours[4]:.2f}", f"{ours[5]:.2f}"])
            continue
        what = f"{cell['tables']}, {cell['rows']} rows"
        rows = [[n, f"{r:.2f}", *(f"{x:.2f}" for x in speeds)] for n, r, *speeds in cell["peers"]]
        header = ["", "ratio", "encode GB/s", "decode GB/s", "encode, zstd -1 = 1", "decode"]
        parts.append(f"{what}:\n\n{page.table(header, rows)}")
        own = cell["peers"][0]
        for name, *of_peer in cell["peers"][4:]:
            better = [
                word
                for word, its, our in zip(
                    ("ratio", "encode", "decode"), of_peer, own[1:], strict=False
                )
                if its > our
            ]
            faster += [f"{what}, {', '.join(better)}: {name}"] if better else []
    header = ["bits a symbol", "size, huff0 = 1", "encode", "decode"]
    parts.append(f"Symbols, how many times huff0's speed:\n\n{page.table(header, coders)}")
    return page.section(record, *parts, faster=faster)
