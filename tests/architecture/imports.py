"""Who imports whom, read from the sources; and who may, read from docs/design/architecture.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/architecture.md"

Graph = dict[str, set[str]]


def allowed(heading: str) -> Graph:
    """Returns the table under a heading of the page: `a`, `b` | `c` says that a and b import c."""
    section = PAGE.read_text().split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    graph: Graph = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            who, whom = (set(re.findall(r"`([^`]+)`", cell)) for cell in line.split("|")[1:3])
            assert not who & graph.keys(), f"{who & graph.keys()} stand in two rows"
            graph |= dict.fromkeys(who, whom)
    return graph


def python_imports(folder: str) -> Graph:
    """Returns which modules of torchrec_bls and sharding each module below a folder imports."""
    graph: Graph = defaultdict(set)
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = parts[:-1]
        module = ".".join(package if parts[-1] == "__init__" else parts)
        graph[module].update(_imported(ast.parse(path.read_text()), package))
    return graph


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield _as_module(f"{origin}.{alias.name}", origin)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield _as_module(alias.name, alias.name)


def _as_module(name: str, origin: str) -> str:
    """`from package import name` imports a module, or something of the package."""
    name, origin = (
        re.sub(r"^torchrec_bls\.sharding\b", "sharding", each) for each in (name, origin)
    )
    path = ROOT / name.replace(".", "/")
    is_module = any(path.with_suffix(suffix).exists() for suffix in ("", ".py", ".pyi"))
    return name if is_module else origin


def cpp_includes(folder: str) -> Graph:
    """Returns which files of csrc/ each source below a folder of it includes."""
    graph: Graph = {}
    for path in sorted((ROOT / "csrc" / folder).rglob("*")):
        if path.suffix in (".h", ".cpp", ".inc"):
            included = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
            graph[str(path.relative_to(ROOT / "csrc"))] = set(included)
    return graph


def between(graph: Graph, units: Iterable[str], separator: str) -> Graph:
    """Returns the graph between units: each name belongs to the longest that it starts with."""
    by_length = sorted(units, key=len, reverse=True)

    def unit_of(name: str) -> str | None:
        return next((u for u in by_length if f"{name}{separator}".startswith(u + separator)), None)

    edges: Graph = defaultdict(set)
    for name, imported in graph.items():
        unit = unit_of(name)
        assert unit is not None, f"{name} is in no row of {PAGE.relative_to(ROOT)}"
        edges[unit] |= {other for each in imported if (other := unit_of(each)) not in (None, unit)}
    return edges


def cycle_in(graph: Graph) -> list[str]:
    """Returns names that import each other in a ring, or nothing."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := visit(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])
