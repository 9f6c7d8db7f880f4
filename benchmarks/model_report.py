"""The tables of docs/reproduction/performance-models.md that come from `study_models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN = "<!-- models: written by benchmarks/study_models.py -->"
END = "<!-- end of models -->"


def write_report(results: dict[str, Any], head: dict[str, Any], page: Path | None) -> None:
    """Prints the tables, and puts them between the markers of a page if there is one.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = "\n\n".join([*_lookups(results), *_collectives(results), _machine(head)])
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
        if kind == "pooled":
            floor = [
                f"{results['retest_percent'][f'lookup_{d}']:.1f}" for d in ("forward", "backward")
            ]
            lines.append(f"| retest floor (GMAE) | {floor[0]} | {floor[1]} |")
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
    for name, each in results["collectives"].items():
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
    return ["\n".join(lines)]


def _machine(head: dict[str, Any]) -> str:
    machine = head["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}; optimizer"
        f" {head['settings']['optimizer']}."
    )


def _score(scores: dict[str, Any]) -> str:
    return (
        f"{scores['gmae_percent']:.1f} / {scores['mape_percent']:.1f} /"
        f" {scores['bias_percent']:+.1f}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
