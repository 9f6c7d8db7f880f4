"""The tables of docs/reproduction/performance-models.md that come from `study_models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN = "<!-- models: written by benchmarks/study_models.py -->"
END = "<!-- end of models -->"
OURS = "analytic x trees, unique rows (ours)"
OURS_WITH_FACTORS = "analytic x trees, reuse factors (ours)"

# What we want at most, per cent: GMAE, MAPE, and signed bias on either side.
_LOOKUP_BARS = {"forward": (7.0, 11.5, 3.0), "backward": (6.5, 10.0, 3.0)}
_COLLECTIVE_BARS = {"between": 12.0, "uneven": 16.0}


def write_report(results: dict[str, Any], head: dict[str, Any], page: Path | None) -> None:
    """Prints the tables, and puts them between the markers of a page if there is one.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = "\n\n".join(
        [
            *_lookups(results),
            *_collectives(results["collectives"]),
            _missed(results),
            _machine(head, results["lookup_time"]),
        ]
    )
    print(text)
    if page is None:
        return
    content = page.read_text()
    if BEGIN not in content or END not in content:
        raise ValueError(f"{page} lacks {BEGIN} and {END}")
    before, rest = content.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def _lookups(results: dict[str, Any]) -> list[str]:
    parts = []
    for kind in ("pooled", "unpooled"):
        forward, backward = (results["lookups"][f"{kind} {d}"] for d in ("forward", "backward"))
        lines = [
            f"**{kind.capitalize()} lookups**, {forward['ops']} configurations, {kind}; GMAE / MAPE"
            " / signed bias in per cent, means of six splits.",
            "",
            "| model | forward | backward |",
            "|---|---|---|",
        ]
        for name in forward["models"]:
            cells = " | ".join(_score(each["models"][name]) for each in (forward, backward))
            lines.append(f"| {name} | {cells} |")
        floors = " | ".join(_percent(each["retest_gmae_percent"]) for each in (forward, backward))
        lines.append(f"| retest floor (GMAE) | {floors} |")
        cover = [f"{100 * each['interval_coverage']:.0f} %" for each in (forward, backward)]
        lines += [
            "",
            f"Held-out measurements within our interval (90 % is aimed at): {' and '.join(cover)}.",
        ]
        parts.append("\n".join(lines))
    return parts


def _collectives(results: dict[str, Any]) -> list[str]:
    lines = [
        "**Collectives** at sizes that nothing was fitted to; GMAE / MAPE / signed bias in"
        " per cent.",
        "",
        "| operation | messages | curve | fitted imbalance | largest rank | alpha-beta, relative |"
        " ordinary | retest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in results["by_curve"].items():
        cells = [
            name.replace("between", "even"),
            str(each["messages"]),
            each["curve"],
            _score(each["models"]["kept"]) if "kept" in each["models"] else "",
            _score(each["models"]["kept, largest rank"]),
            _score(each["models"]["alpha-beta, relative"]),
            _score(each["models"]["alpha-beta, ordinary"]),
            _percent(each["retest_gmae_percent"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    together = [
        "| all of these, by what a profile holds | GMAE / MAPE / signed bias |",
        "|---|---|",
        *(
            f"| {name.replace('between', 'even')} | {_score(scores)} |"
            for name, scores in results["all"].items()
        ),
    ]
    return ["\n".join(lines), "\n".join(together)]


def _missed(results: dict[str, Any]) -> str:
    """Every bar that these results miss, and by how much."""
    missed = _missed_lookups(results["lookups"])
    for name, each in results["collectives"]["by_curve"].items():
        what = name.replace("between", "even")
        models = each["models"]
        ours = models.get("kept", models["kept, largest rank"])["gmae_percent"]
        bar = _COLLECTIVE_BARS[name.rsplit(", ", 1)[1]]
        if ours > bar:
            missed.append(f"{what}: GMAE {ours:.1f} %, wanted {bar:g}")
        straight = models["alpha-beta, relative"]["gmae_percent"]
        if ours > straight:
            missed.append(f"{what}: GMAE {ours:.1f} %, and relative alpha-beta's is {straight:.1f}")
    listed = "\n".join(f"- {each}." for each in missed) or "- None."
    return f"**Bars that these figures miss:**\n\n{listed}"


def _missed_lookups(lookups: dict[str, Any]) -> list[str]:
    missed = []
    for what, result in lookups.items():
        ours = result["models"][OURS]
        names = ("gmae_percent", "mape_percent", "bias_percent")
        for name, title, bar in zip(
            names, ("GMAE", "MAPE", "bias"), _LOOKUP_BARS[what.split()[1]], strict=True
        ):
            if abs(ours[name]) > bar:
                missed.append(f"lookups, {what}: {title} {ours[name]:.1f} %, wanted {bar:g}")
        for other, scores in result["models"].items():
            for name, title in (("gmae_percent", "GMAE"), ("mape_percent", "MAPE")):
                if other not in (OURS, OURS_WITH_FACTORS) and scores[name] < ours[name]:
                    missed.append(
                        f"lookups, {what}: {title} {ours[name]:.1f} %, and that of"
                        f" '{other}' is {scores[name]:.1f}"
                    )
    return missed


def _machine(head: dict[str, Any], lookup_time: str) -> str:
    machine = head["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}; optimizer"
        f" {head['settings']['optimizer']}. Time of a lookup: {lookup_time} of its repeats."
    )


def _score(scores: dict[str, Any]) -> str:
    return (
        f"{scores['gmae_percent']:.1f} / {scores['mape_percent']:.1f} /"
        f" {scores['bias_percent']:+.1f}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
