"""The tables of a probe that a person reads."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness import page

Results = dict[str, list[dict[str, Any]]]


def tables(environment: dict[str, Any], results: Results) -> str:
    """All tables, with a line for what failed or was left out."""
    parts = [
        ("What it ran on", machine(environment, results.get("facts", []))),
        ("What registers", _registrations(results)),
        ("Host memory that CUDA makes", _vmm(results.get("vmm", []))),
        ("An owner that is killed", _peers(results.get("second process", []))),
        ("Gathers from the host", _gathers(results)),
        ("Beside a GEMM", _beside(results.get("beside a GEMM", []))),
        ("Failed or left out", failed(results)),
    ]
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts if text)


def problems(results: Results) -> list[str]:
    """Why the probe has failed: nothing could be registered, or a row was wrong."""
    registered = [each for each in results.get("registrations", []) if each.get("error") == ""]
    found = [] if registered else ["no host memory could be registered"]
    for step, each in _cells(results):
        if each.get("wrong_rows"):
            found.append(f"{step}: {each['wrong_rows']} wrong rows in {_label(each)}")
    return found


def machine(environment: dict[str, Any], facts: Sequence[dict[str, Any]]) -> str:
    keys = ("sandbox", "kernel", "cpu", "cores", "memory_left_gib", "huge_pages_of_files")
    rows = [(key, environment.get(key)) for key in keys]
    rows += list(environment.get("versions", {}).items())
    for each in facts:
        rows += [(key, value) for key, value in each.items() if not isinstance(value, dict)]
        rows += [*each.get("nvidia_smi", {}).items(), *each.get("attributes", {}).items()]
    return page.table(["", ""], [(key, _number(value)) for key, value in rows])


def _registrations(results: Results) -> str:
    cells = [*results.get("registrations", []), *results.get("large registrations", [])]
    rows = [
        (
            each["way"],
            _pages(each),
            f"{each['size'] / 2**30:.3g} in {each['piece'] / 2**30:.3g}",
            each["error"] or "registered",
            _number(each.get("s_per_gib")),
            _number(each.get("hbm_mib_per_gib")),
            _grown(each, "Pss", 10),
            _grown(each, "Shmem", 10),
            _grown(each, "mapping_anonymous", 20),
            _rows(each),
            _steps(each),
        )
        for each in cells
        if "error" in each
    ]
    header = ["memory", "pages", "GiB", "result", "s/GiB", "HBM MiB/GiB"]
    header += ["PSS MiB", "Shmem MiB", "copied MiB", "rows read", "mprotect and seals"]
    return _table(header, rows)


def _vmm(cells: Iterable[dict[str, Any]]) -> str:
    rows = [
        (
            each["way"],
            _number(each["s_per_gib"]),
            _number(each["hbm_mib_per_gib"]),
            _rows(each),
        )
        for each in cells
        if "s_per_gib" in each
    ]
    return _table(["memory", "s/GiB", "HBM MiB/GiB", "rows read"], rows)


def _peers(cells: Iterable[dict[str, Any]]) -> str:
    rows = [
        (
            each["way"],
            _pages(each),
            _number(each["s_per_gib"]),
            sum(who.get("Pss", 0) for who in each["memory"].values()) >> 10,
            _grown(each["host"], "Shmem", 10, "both"),
            _grown(each["host"], "MemAvailable", 10, "both"),
            f"{each['reads_before_and_at_death']} + {each['reads_after_death']}",
            f"{each['wrong_rows']} wrong rows",
            each.get("later_writable_mapping", ""),
        )
        for each in cells
        if "reads_after_death" in each
    ]
    header = ["memory", "pages", "joining, s/GiB", "both, PSS MiB", "Shmem MiB", "left MiB"]
    return _table([*header, "reads up to the death and after", "", "a later writer"], rows)


def _gathers(results: Results) -> str:
    cells = [
        each
        for step in ("gathers", "large gathers")
        for each in results.get(step, [])
        if "gb_per_s" in each
    ]
    rates: dict[tuple[Any, ...], dict[Any, str]] = {}
    for each in cells:
        row = (
            each["what"],
            each.get("window", each["size"]),
            each.get("order", ""),
            _pages(each),
            each.get("row_bytes", ""),
            each["bytes"],
        )
        rates.setdefault(row, {})[each.get("blocks", "")] = f"{each['gb_per_s']:.1f}"
    counts = sorted({each["blocks"] for each in cells if "blocks" in each})
    rows = [
        (
            what,
            f"{size / 2**30:.3g}",
            order,
            pages,
            width,
            f"{moved / 1e6:.1f}",
            *(of.get(count, "") for count in ("", *counts)),
        )
        for (what, size, order, pages, width, moved), of in rates.items()
    ]
    header = ["GB/s", "GiB", "ids", "pages", "row, B", "MB read", "copy"]
    return _table([*header, *(f"{count} blocks" for count in counts)], rows)


def _beside(cells: Iterable[dict[str, Any]]) -> str:
    rows = [
        (
            each["what"],
            each.get("blocks", ""),
            f"{each['gb_per_s_alone']:.1f}",
            f"{each['tflops_alone']:.0f}",
            f"{each['reads_slower']:.2f}",
            f"{each['gemm_slower']:.2f}",
        )
        for each in cells
        if "gemm_slower" in each
    ]
    header = ["", "blocks", "reads alone, GB/s", "GEMM alone, TFLOP/s"]
    return _table([*header, "reads take times", "GEMM takes times"], rows)


def failed(results: Results) -> str:
    return "\n".join(
        f"- {step}, {_label(each)}: {each['failed']}"
        for step, each in _cells(results)
        if "failed" in each
    )


def _cells(results: Results) -> list[tuple[str, dict[str, Any]]]:
    return [(step, each) for step, cells in results.items() for each in cells]


def _label(cell: dict[str, Any]) -> str:
    names = ("way", "what", "huge", "size", "piece", "row_bytes", "blocks")
    return ", ".join(f"{name} {cell[name]}" for name in names if name in cell) or "all of it"


def _pages(cell: dict[str, Any]) -> str:
    """The size of the pages that were asked for, and the share of huge ones if it differs."""
    share = cell.get("huge_share")
    odd = share is not None and round(share, 2) != float(cell["huge"])
    return ("2 MiB" if cell["huge"] else "4 KiB") + (f" ({share:.0%} huge)" if odd else "")


def _grown(cell: dict[str, Any], key: str, shift: int, then: str = "after") -> str:
    """MiB before and then."""
    states = [cell.get(when, {}).get(key) for when in ("before", then)]
    if None in states:
        return ""
    before, after = (state >> shift for state in states)
    return f"{before} to {after}"


def _rows(cell: dict[str, Any]) -> str:
    return f"{cell['wrong_rows']} of {cell['rows']} wrong" if "rows" in cell else ""


def _steps(cell: dict[str, Any]) -> str:
    names = ("protect", "write_seal", "size_seals", "future_write_seal")
    return ", ".join(f"{name} {cell[name] or 'done'}" for name in names if name in cell)


def _number(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else value


def _table(header: list[str], rows: list[tuple[Any, ...]]) -> str:
    return page.table(header, rows) if rows else ""
