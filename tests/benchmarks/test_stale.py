"""Which records are of other code: by their commits, and by what their programs measure."""

from pathlib import Path

import pytest

from benchmarks import ROOT, stale
from benchmarks.programs import PROGRAMS, Program
from tests.benchmarks.test_record import git


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=lambda program: program.name)
def test_what_a_program_measures_is_there(program: Program) -> None:
    assert (ROOT / "benchmarks" / f"{program.name.replace('.', '/')}.py").is_file()
    for path in program.measures:
        assert (ROOT / path).exists(), path


@pytest.fixture
def commit(tmp_path: Path) -> str:
    """Returns a commit of the repository in `tmp_path`, which has changed since."""
    lines = "".join(f"line {number}\n" for number in range(50))
    files = {
        "csrc/codecs/same.cpp": lines,
        "csrc/codecs/frame.cpp": lines,
        "csrc/lookup/old.cpp": lines.replace("line", "row"),
        "csrc/tests/test.cpp": lines,
        "benchmarks/codecs/rows.py": lines,
        "benchmarks/codecs/page.py": lines,
    }
    git(tmp_path, "init", "--quiet")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "before")
    before = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    for name in ("frame.cpp", "../tests/test.cpp", "../../benchmarks/codecs/page.py"):
        path = tmp_path / "csrc/codecs" / name
        path.write_text(f"{path.read_text()}one more\n")
    git(tmp_path, "mv", "csrc/lookup/old.cpp", "csrc/codecs/moved.cpp")
    git(tmp_path, "rm", "--quiet", "benchmarks/codecs/rows.py")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "after")
    return before


def test_files_that_moved_are_unchanged(tmp_path: Path, commit: str) -> None:
    changed = stale.changed_since(commit, tmp_path)
    assert changed == [
        stale.Changed("benchmarks/codecs/rows.py", 50),
        stale.Changed("csrc/codecs/frame.cpp", 1),
    ]


def test_a_program_has_its_own_file_and_what_it_measures(tmp_path: Path, commit: str) -> None:
    changed = stale.changed_since(commit, tmp_path)
    assert changed is not None

    def paths(name: str, *measures: str) -> list[str]:
        return [each.path for each in stale.changed_of(changed, Program(name, measures))]

    assert paths("codecs.rows", "csrc/codecs") == [each.path for each in changed]
    assert paths("codecs.rows") == ["benchmarks/codecs/rows.py"]
    assert paths("codecs.other", "csrc/codecs/frame.cpp") == ["csrc/codecs/frame.cpp"]
    assert paths("codecs.other", "csrc/cod", "csrc/lookup") == []


def test_a_commit_of_elsewhere_is_not_known(tmp_path: Path, commit: str) -> None:
    assert stale.changed_since("0123456789ab", tmp_path) is None
    assert stale.changed_since(git(tmp_path, "rev-parse", "HEAD"), tmp_path) == []


def test_the_most_changed_stands_first() -> None:
    rows = [["a", "1", 5, 1, "x (5)"], ["b", "2", 70, 2, "y (60)"]]
    unknown = ["c", "3", "not in this repository", "", ""]
    lines = stale.table([*rows, unknown]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| c", "| b", "| a"]
