"""Tutorials do what they say: their blocks run as they stand and print what the page shows."""

import time
from pathlib import Path

import pytest

from tests.docs.tutorials import missing_line, read, run
from tests.paths import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if read(page).commands], ids=lambda page: page.stem
)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    tutorial = read(page)
    for command, printed in run(tutorial, tmp_path):
        assert missing_line(command.expected, printed) is None


def test_the_file_to_download_has_the_blocks_of_its_page() -> None:
    folder = ROOT / "docs" / "tutorials"
    text = read(folder / "first-model.md").files["first_model.py"]
    assert (folder / "first_model.py").read_text() == text


def test_each_tutorial_runs_something() -> None:
    # The blocks of recovery.md are those of an example that .ci/run runs.
    assert {page.stem for page in PAGES if not read(page).commands} == {"recovery"}


def page_of(text: str, tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_blocks_go_on_with_the_file_that_was_named(tmp_path: Path) -> None:
    page = page_of(
        "```python\n# a.py\nx = 1\n```\ntext\n```python\nprint(x)\n```\n"
        "```python\n# b.py\n```\n```sh\npython a.py\n```\n\n```text\n1\n```\n",
        tmp_path,
    )
    tutorial = read(page)
    assert tutorial.files == {"a.py": "# a.py\nx = 1\nprint(x)\n", "b.py": "# b.py\n"}
    ((command, printed),) = run(tutorial, tmp_path)
    assert (command.script, command.expected, printed) == ("python a.py\n", "1\n", "1\n")


@pytest.mark.parametrize("text", ["```python\nx = 1\n```\n", "```text\n1\n```\n"])
def test_what_belongs_to_nothing_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        read(page_of(text, tmp_path))


def test_a_failing_command_fails(tmp_path: Path) -> None:
    page = page_of("```sh\nfalse\necho 1\n```\n", tmp_path)
    with pytest.raises(Exception, match="exit status 1"):
        list(run(read(page), tmp_path))


def test_what_runs_on_serves_the_commands_after_it_and_ends_with_them(tmp_path: Path) -> None:
    begun, after = "sleep 300 > sleep.log 2>&1 &\necho $!", "kill -0 $(cat pid) && echo runs"
    tutorial = read(page_of(f"```sh\n{begun}\n```\n```sh\n{after}\n```\n", tmp_path))
    commands = run(tutorial, tmp_path)
    _, printed = next(commands)
    (tmp_path / "pid").write_text(printed)
    _, listed = next(commands)
    assert listed == "runs\n"
    assert list(commands) == []
    end = time.monotonic() + 5
    while is_running(int(printed)):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # ended, and nobody asked how


def test_lines_are_looked_for_in_their_order() -> None:
    printed = "first 1\nbetween\nsecond  2\n"
    assert missing_line("first ...\nsecond 2\n", printed) is None
    assert missing_line("second ...\nfirst 1\n", printed) == "first 1"
    assert missing_line("first\n", printed) == "first"


def test_measured_figures_may_be_others() -> None:
    assert missing_line("step 1.25 us, of 1,059\n", "step 99.5  us, of 2,000\n") is None
    assert missing_line("20 outputs\n", "21 outputs\n") == "20 outputs"
