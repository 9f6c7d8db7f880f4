"""Tables and figure of the delay benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Entries = list[dict[str, Any]]

_PEERS = {
    "ideal": ("ideal: same delays, free exchange", "tab:orange", "--", "s"),
    "channel": ("BoundedLagChannel", "tab:blue", "-", "o"),
    "gloo": ("gloo with a window", "tab:green", "-", "^"),
}
_TITLES = {
    "dlrm": "DLRM, real compute, delays 0-10 ms",
    "heterogeneous": "DLRM, 1-100 ids a table, no delays",
}


def tables(environment: dict[str, Any], results: dict[str, Entries]) -> str:
    """All parts that were measured, at most 100 columns wide."""
    lines = [
        f"{environment['cpu']}, {environment['cores']} cores, load {environment['load_average']} "
        f"before, Linux {environment['kernel']}",
        f"torch {environment['versions']['torch']}; commit {environment['commit']}; "
        f"{environment['date']}",
        "ms per step, median of the runs [lowest-highest]; CPU is that of a rank",
    ]
    if "sleep" in results:
        lines += _sleep_table(results["sleep"])
    if "forward" in results:
        lines += _forward_table(results["forward"])
    for part, title in _TITLES.items():
        if part in results:
            lines += _dlrm_table(title, results[part])
    return "\n".join(lines)


def _sleep_table(entries: Entries) -> list[str]:
    lines = [
        "",
        "Dense part as a sleep; computed: ideal with exact sleeps; +: over the measured ideal",
        f"{'ranks':>5} {'bound':>5} {'computed':>8} {'ideal':>20} {'channel':>20} {'+':>6} "
        f"{'CPU':>5} {'gloo':>20} {'+':>6} {'CPU':>5}",
    ]
    for entry in entries:
        times, cpu = entry["ms_per_step"], entry["cpu_ms_per_step"]
        row = (
            f"{entry['ranks']:5} {entry['bound']:5} {entry['computed_ideal_ms']:8.2f} "
            f"{_cell(times['ideal']):>20}"
        )
        for name in ("channel", "gloo"):
            row += (
                f" {_cell(times[name]):>20} {100 * (entry['ratio'][name]['median'] - 1):5.1f}%"
                f" {cpu[name]['median']:5.2f}"
            )
        lines.append(row)
    return lines


def _forward_table(entries: Entries) -> list[str]:
    lines = [
        "",
        "Sharded EBC at bound 0, delays, dense part as a sleep",
        f"{'ranks':>5} {'batch':>5} {'TorchRec on gloo':>20} {'bounded lag':>20} {'ratio':>6}",
    ]
    for entry in entries:
        times = entry["ms_per_step"]
        lines.append(
            f"{entry['ranks']:5} {entry['batch']:5} {_cell(times['torchrec']):>20} "
            f"{_cell(times['ours']):>20} {entry['ratio']['ours']['median']:6.2f}"
        )
    return lines


def _dlrm_table(title: str, entries: Entries) -> list[str]:
    lines = [
        "",
        f"{title}, 4 ranks",
        f"{'':16} {'ms':>20} {'ideal':>7} {'waiting':>8} {'pulled':>6}",
    ]
    for entry in entries:
        row = f"{entry['name']:16} {_cell(entry['ms_per_step']):>20}"
        if entry["bound"] is not None:
            row += f" {entry['ideal_ms']:7.2f} {100 * entry['wait_share']:7.1f}%{entry['pulled']:7}"
        lines.append(row)
    return lines


def _cell(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} [{times['min']:.2f}-{times['max']:.2f}]"


def plot(path: Path, environment: dict[str, Any], results: dict[str, Entries]) -> None:
    """Step time against the bound, as Fig. 7 of the BLS paper; one panel a setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({entry["ranks"] for entry in results.get("sleep", [])})
    whole = [part for part in _TITLES if part in results]
    panels = len(counts) + len(whole)
    figure, axes = pyplot.subplots(1, panels, figsize=(4.4 * panels, 4), squeeze=False)
    for axis, count in zip(axes[0], counts, strict=False):
        entries = [entry for entry in results["sleep"] if entry["ranks"] == count]
        for name, style in _PEERS.items():
            _curve(axis, entries, [entry["ms_per_step"][name] for entry in entries], style)
        axis.set_title(f"dense part as a sleep, delays 0-10 ms, {count} ranks", fontsize=9)
    for axis, part in zip(axes[0][len(counts) :], whole, strict=True):
        bounded = [entry for entry in results[part] if entry["bound"] is not None]
        reference = next(entry for entry in results[part] if entry["bound"] is None)
        axis.axhline(
            reference["ms_per_step"]["median"], color="tab:gray", linestyle=":", label="TorchRec"
        )
        ideals: list[float] = [entry["ideal_ms"] for entry in bounded]
        ideal = [{"median": value, "min": value, "max": value} for value in ideals]
        _curve(axis, bounded, ideal, _PEERS["ideal"])
        style = ("bounded-lag pipeline", *_PEERS["channel"][1:])
        _curve(axis, bounded, [entry["ms_per_step"] for entry in bounded], style)
        axis.set_title(f"{_TITLES[part]}, 4 ranks", fontsize=9)
    for axis in axes[0]:
        axis.set_xlabel("bound k")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower left")
    axes[0][0].set_ylabel("ms per step")
    figure.suptitle(f"{environment['cpu']}, {environment['cores']} cores", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(
    axis: Any, entries: Entries, times: list[dict[str, float]], style: tuple[str, str, str, str]
) -> None:
    label, colour, line, marker = style
    positions = range(len(entries))
    axis.errorbar(
        positions,
        [t["median"] for t in times],
        yerr=([t["median"] - t["min"] for t in times], [t["max"] - t["median"] for t in times]),
        label=label,
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=4,
        capsize=2,
    )
    axis.set_xticks(positions, [str(entry["bound"]) for entry in entries])
