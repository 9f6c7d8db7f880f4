"""Pages: Markdown tables, conditions, what is between markers, and figures."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITER = "benchmarks/results_pages.py"


class PageError(SystemExit):
    """A page lacks the markers of a section; the text is what a program ends with."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def fill(page: str, section: str, text: str, of: str = "the page") -> str:
    """Puts `text` between the markers of a section; a PageError says which of them `of` lacks."""
    first, last = f"<!-- {section}: written by {WRITER} -->", f"<!-- end of {section} -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise PageError(f"{of} needs the lines {first} and {last}, in this order")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"


def section(record: dict[str, Any], *parts: str, faster: Iterable[str] | None = None) -> str:
    """Parts of a page, the conditions of their record, and the cells where a peer was faster."""
    listed = [] if faster is None else [faster_peers(faster)]
    return "\n\n".join([*parts, conditions(record), *listed])


def host(record: dict[str, Any]) -> str:
    """The machine on which a record was taken."""
    return f"{record['environment']['cpu']}, {record['environment']['cores']} cores"


def conditions(record: dict[str, Any]) -> str:
    """Where, when and by which command a record was taken."""
    where = record["environment"]
    return (
        f"*{host(record)}, load {where['load_average']} before the run, "
        f"Linux {where['kernel']}, torch {where['versions']['torch']}, commit {where['commit']}, "
        f"{where['date'][:10]}: `{where['command']}`*"
    )


def faster_peers(lines: Iterable[str]) -> str:
    """The list of the cells in which something else was faster."""
    listed = [f"- {line}" for line in lines] or ["In none of these cells."]
    return "\n".join(["## Where a peer was faster", "", *listed])


def size(count: int) -> str:
    """Bytes as a reader says them."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count // scale} {unit}"
    return f"{count} B"


def median_and_range(times: dict[str, float]) -> str:
    """A median with its extremes."""
    return f"{times['median']:.2f} [{times['min']:.2f}-{times['max']:.2f}]"


@contextmanager
def figure(path: Path, width: float, height: float, **grid: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its array of axes, (rows, columns), to draw on; saved as PNG at the end."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    yield made, made.subplots(squeeze=False, **grid)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120)


def curve(axis: Any, points: Iterable[tuple[float, dict[str, float]]], **style: Any) -> None:
    """Draws medians with their extremes, or means with their intervals, over positions."""
    places, values = zip(*points, strict=True)
    if "mean" in values[0]:
        middle, errors = [v["mean"] for v in values], [v["ci95"] for v in values]
    else:
        middle = [v["median"] for v in values]
        errors = [[abs(v[end] - v["median"]) for v in values] for end in ("min", "max")]
    options = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1, **style}
    axis.errorbar(places, middle, yerr=errors, **options)


def bound_axis(axis: Any, bounds: Sequence[int], label: str) -> None:
    """Names the bounds, and starts at 0."""
    axis.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    axis.set(xlabel="bound k", ylabel=label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
