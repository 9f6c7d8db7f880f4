"""Pages: Markdown tables, conditions, what is between markers, and figures."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITER = "benchmarks/results_pages.py"

#: By peer a summary of its times, and how its curve looks.
Peers, Styles = dict[str, dict[str, float]], dict[str, dict[str, Any]]


class PageError(SystemExit):
    """A page lacks the markers of a section; the text is what a program ends with."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
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
    if faster is None:
        return "\n\n".join([*parts, conditions(record)])
    listed = [f"- {line}" for line in faster] or ["In none of these cells."]
    peers = ["## Where a peer was faster", "\n".join(listed)]
    return "\n\n".join([*parts, conditions(record), *peers])


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


def size(count: int) -> str:
    """Bytes as a reader says them."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count // scale} {unit}"
    return f"{count} B"


def median_and_range(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} [{times['min']:.2f}-{times['max']:.2f}]"


@contextmanager
def figure(path: Path, width: float, height: float, **grid: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its array of axes, (rows, columns), to draw on; saved as PNG at the end."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    yield made, made.subplots(squeeze=False, **grid)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120)


def curves(axis: Any, points: Iterable[tuple[float, Peers]], styles: Styles) -> None:
    """Draws each peer's medians with their extremes, or means with their intervals, over places."""
    of_peers = defaultdict(list)
    for place, peers in points:
        for peer, times in peers.items():
            of_peers[peer].append((place, times))
    for peer, of_peer in of_peers.items():
        places, values = zip(*of_peer, strict=True)
        if "mean" in values[0]:
            middle, errors = [v["mean"] for v in values], [v["ci95"] for v in values]
        else:
            middle = [v["median"] for v in values]
            errors = [[abs(v[end] - v["median"]) for v in values] for end in ("min", "max")]
        options = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1, **styles[peer]}
        axis.errorbar(places, middle, yerr=errors, **options)


def curves_by_bound(axis: Any, times: dict[int, Peers], styles: Styles, label: str) -> None:
    """Draws what each peer took over the bound; `label` is that of the ordinate."""
    curves(axis, enumerate(times.values()), styles)
    axis.set_xticks(range(len(times)), map(str, times))
    axis.set(xlabel="bound k", ylabel=label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
