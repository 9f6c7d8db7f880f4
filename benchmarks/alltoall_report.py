"""Table and figure of the all-to-all benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PEERS = {
    "raw": "raw limit",
    "channel": "ours, C++",
    "open_mpi": "Open MPI",
    "channel_python": "ours, Py",
    "gloo": "gloo",
}
_RATIOS = {
    "ours/raw": ("channel", "raw"),
    "MPI/ours": ("open_mpi", "channel"),
    "gloo/Py": ("gloo", "channel_python"),
}
_MODES = {"one_shot": "one-shot", "train": "train"}


def table(environment: dict[str, Any], settings: dict[str, Any], results: list[Any]) -> str:
    """All cells with ratios, at most 100 columns wide."""
    letters = _setting_letters(results)
    lines = [
        f"{environment['cpu']}, {environment['cores']} cores, load {environment['load_average']} "
        f"before, Linux {environment['kernel']}",
        f"torch {environment['versions']['torch']}, {settings['mpi'] or 'no MPI'}; "
        f"commit {environment['commit']}; {environment['date']}",
        environment["command"],
        "us per call: slowest rank, median over calls, then median over "
        f"{settings['turns']} turns ± half their range",
    ]
    if settings["touch"]:
        lines.append("every receiver sums all bytes it gets, within the time")
    group = None
    for result in results:
        if group != (result["mode"], result["ranks"]):
            group = (result["mode"], result["ranks"])
            lines += ["", f"{_MODES[result['mode']]}, {result['ranks']} ranks", _header()]
        lines.append(_row(result, letters))
    if letters:
        lines += ["", "Open MPI's best setting in each cell, of those tried there:"]
        lines += [f"  {letter}  {setting}" for setting, letter in letters.items()]
    return "\n".join(lines)


def plot(path: Path, environment: dict[str, Any], results: list[Any]) -> None:
    """One panel per mode and number of ranks: time per call over size, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted({result["ranks"] for result in results})
    figure, axes = pyplot.subplots(
        len(_MODES), len(ranks), figsize=(4 * len(ranks), 7), sharex=True, squeeze=False
    )
    for row, mode in enumerate(_MODES):
        for column, count in enumerate(ranks):
            axis = axes[row][column]
            cells = [r for r in results if r["mode"] == mode and r["ranks"] == count]
            for peer, label in _PEERS.items():
                points = [
                    (cell["bytes_per_pair"], cell["peers"][peer]["us_per_call"])
                    for cell in cells
                    if peer in cell["peers"]
                ]
                if not points:
                    continue
                medians = [us["median"] for _, us in points]
                below = [us["median"] - us["min"] for _, us in points]
                above = [us["max"] - us["median"] for _, us in points]
                axis.errorbar(
                    [size for size, _ in points],
                    medians,
                    yerr=(below, above),
                    label=label,
                    marker="o",
                    markersize=4,
                    linestyle="--" if peer == "raw" else "-",
                )
            axis.set_xscale("log", base=2)
            axis.set(yscale="log", title=f"{_MODES[mode]}, {count} ranks")
            sizes = [cell["bytes_per_pair"] for cell in cells]
            axis.set_xticks(sizes, [_size(size) for size in sizes], fontsize=8)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("per ordered pair of ranks")
    for row_axes in axes:
        row_axes[0].set_ylabel("us per call")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(
        f"All-to-all-v on one host: {environment['cpu']}, {environment['cores']} cores", fontsize=11
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _setting_letters(results: list[Any]) -> dict[str, str]:
    settings = sorted(
        {r["peers"]["open_mpi"]["setting"] for r in results if "open_mpi" in r["peers"]}
    )
    return {setting: chr(ord("a") + index) for index, setting in enumerate(settings)}


def _header() -> str:
    peers = "".join(f"{name:>{14 if peer == 'open_mpi' else 12}}" for peer, name in _PEERS.items())
    return f"{'pair':>8}{peers}" + "".join(f"{name:>9}" for name in _RATIOS)


def _row(result: dict[str, Any], letters: dict[str, str]) -> str:
    peers = result["peers"]
    columns = [f"{_size(result['bytes_per_pair']):>8}"]
    for peer in _PEERS:
        columns.append(_value(peers[peer]["us_per_call"]) if peer in peers else f"{'-':>12}")
        if peer == "open_mpi":
            columns.append(f" {letters[peers[peer]['setting']]}" if peer in peers else "  ")
    for above, below in _RATIOS.values():
        known = above in peers and below in peers
        columns.append(f"{_ratio(peers, above, below):>8.2f}x" if known else f"{'-':>9}")
    return "".join(columns)


def _ratio(peers: dict[str, Any], above: str, below: str) -> float:
    ratio: float = peers[above]["us_per_call"]["median"] / peers[below]["us_per_call"]["median"]
    return ratio


def _value(us: dict[str, float]) -> str:
    median = us["median"]
    percent = round(100 * (us["max"] - us["min"]) / 2 / median)
    digits = 2 if median < 10 else 1 if median < 100 else 0
    return f"{median:>7.{digits}f}{f'±{percent}%' if percent < 100 else '±>99':>5}"


def _size(size: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
