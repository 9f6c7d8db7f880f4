"""Table of the backend benchmark."""

from __future__ import annotations

from typing import Any

_MODES = {"one_shot": "single calls", "train": "back to back"}


def table(environment: dict[str, Any], results: dict[str, Any]) -> str:
    """Medians of both backends, and how many times faster bls is."""
    lines = [
        f"{environment['cpu']}, {environment['cores']} cores, load {environment['load_average']} "
        f"before, Linux {environment['kernel']}, torch {environment['versions']['torch']}",
        f"commit {environment['commit']}; {environment['date']}; {environment['command']}",
        "",
        "all_to_all_single, us per call: slowest rank, median of the turns",
        f"{'ranks':>5} {'per pair':>9} {'mode':>13} {'bls':>10} {'gloo':>10} {'times':>6}",
    ]
    for cell in results["alltoall"]:
        what = f"{cell['ranks']:5} {cell['size']:7} B {_MODES[cell['mode']]:>13}"
        lines.append(f"{what} {_times(cell, 1)}")
    lines += [
        "",
        "forward of unmodified TorchRec, 26 tables, dimension 64, ms: slowest rank, median",
        f"{'':17} {'ranks':>5} {'batch':>5} {'bls':>10} {'gloo':>10} {'times':>6}",
    ]
    for cell in results["torchrec"]:
        name = f"{cell['module']} {cell['sharding'].replace('_', '-')}"
        lines.append(f"{name:17} {cell['ranks']:5} {cell['batch']:5} {_times(cell, 2)}")
    return "\n".join(lines)


def _times(cell: dict[str, Any], digits: int) -> str:
    bls, gloo = (cell[backend]["median"] for backend in ("bls", "gloo"))
    return f"{bls:10.{digits}f} {gloo:10.{digits}f} {gloo / bls:6.1f}"
