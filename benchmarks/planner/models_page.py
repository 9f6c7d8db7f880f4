"""The tables of docs/reproduction/performance-models.md that come from `study_models.py`."""

from typing import Any

from benchmarks.harness import page

OURS = "analytic x trees, unique rows (ours)"
OURS_WITH_FACTORS = "analytic x trees, reuse factors (ours)"

# What we want at most, per cent: GMAE, MAPE, and signed bias on either side.
_LOOKUP_BARS = {"forward": (7.0, 11.5, 3.0), "backward": (6.5, 10.0, 3.0)}
_COLLECTIVE_BARS = {"between": 12.0, "uneven": 16.0}


def section(record: dict[str, Any]) -> str:
    """What docs/reproduction/performance-models.md says of lookups and collectives."""
    results = record["results"]
    parts = [*_lookups(results), *_collectives(results["collectives"]), _missed(results)]
    return "\n\n".join([*parts, _machine(record)])


def _lookups(results: dict[str, Any]) -> list[str]:
    parts = []
    for kind in ("pooled", "unpooled"):
        both = [results["lookups"][f"{kind} {direction}"] for direction in ("forward", "backward")]
        rows = [
            [name, *(_score(each["models"][name]) for each in both)] for name in both[0]["models"]
        ]
        floors = [_percent(each["retest_gmae_percent"]) for each in both]
        cover = [f"{100 * each['interval_coverage']:.0f} %" for each in both]
        parts += [
            f"**{kind.capitalize()} lookups**, {both[0]['ops']} configurations, {kind}; GMAE / MAPE"
            " / signed bias in per cent, means of six splits.",
            page.table(["model", "forward", "backward"], [*rows, ["retest floor (GMAE)", *floors]]),
            f"Held-out measurements within our interval (90 % is aimed at): {' and '.join(cover)}.",
        ]
    return parts


def _collectives(results: dict[str, Any]) -> list[str]:
    models = ("kept", "kept, largest rank", "alpha-beta, relative", "alpha-beta, ordinary")
    rows = [
        [
            name.replace("between", "even"),
            str(each["messages"]),
            each["curve"],
            *(_score(each["models"][model]) if model in each["models"] else "" for model in models),
            _percent(each["retest_gmae_percent"]),
        ]
        for name, each in results["by_curve"].items()
    ]
    header = ["operation", "messages", "curve", "fitted imbalance", "largest rank"]
    header += ["alpha-beta, relative", "ordinary", "retest"]
    every = [[name.replace("between", "even"), _score(s)] for name, s in results["all"].items()]
    return [
        "**Collectives** at sizes that nothing was fitted to; GMAE / MAPE / signed bias in"
        " per cent.",
        page.table(header, rows),
        page.table(["all of these, by what a profile holds", "GMAE / MAPE / signed bias"], every),
    ]


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


def _machine(record: dict[str, Any]) -> str:
    machine = record["results"]["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}; optimizer"
        f" {record['settings']['optimizer']}. Time of a lookup: {record['results']['lookup_time']}"
        " of its repeats."
    )


def _score(scores: dict[str, Any]) -> str:
    return (
        f"{scores['gmae_percent']:.1f} / {scores['mape_percent']:.1f} /"
        f" {scores['bias_percent']:+.1f}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
