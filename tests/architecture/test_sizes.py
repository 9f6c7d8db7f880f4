"""No folder and no file is larger than docs/design/architecture.md allows."""

import subprocess
from collections import Counter
from pathlib import Path

from tests.architecture.imports import ROOT

MOST_FILES, MOST_LINES = 14, 400
MOST_OF_BENCHMARKS = 11_220
SOURCES = (".py", ".cpp", ".h", ".inc")


def source_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    paths = [Path(name) for name in listed if name.endswith(SOURCES)]
    return [path for path in paths if (ROOT / path).exists()]


def lines_of_code(path: Path) -> int:
    marks = ("#",) if path.suffix == ".py" else ("//", "/*", "*")
    lines = (line.strip() for line in (ROOT / path).read_text().splitlines())
    return sum(1 for line in lines if line and not line.startswith(marks))


def test_files_are_short() -> None:
    sizes = {str(path): lines_of_code(path) for path in source_files()}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_benchmarks_stay_smaller_than_what_they_measure() -> None:
    paths = [path for path in source_files() if path.parts[0] == "benchmarks"]
    # All lines, as wc counts them.
    assert sum((ROOT / path).read_text().count("\n") for path in paths) <= MOST_OF_BENCHMARKS


def test_folders_are_seen_at_a_glance() -> None:
    # An empty __init__.py is a mark and no file to read.
    files = Counter(path.parent for path in source_files() if (ROOT / path).stat().st_size)
    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}
