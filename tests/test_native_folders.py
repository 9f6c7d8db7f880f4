"""Who includes whom in csrc/: each folder knows those below it and no other."""

import re
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
# A folder and those that it may include, besides itself and csrc/errors.h. The longest name counts.
MAY_INCLUDE: dict[str, set[str]] = {
    "host": set(),
    "codecs": {"host"},
    "transport": {"transport/shm", "transport/verbs"},
    "transport/shm": {"transport", "host"},
    "transport/two_sided": {"transport"},
    "transport/verbs": {"transport", "transport/verbs/device"},
    "transport/verbs/device": set(),
    "channel": {"transport", "host"},
    "messages": {"channel", "codecs"},
    "lookup": {"messages", "channel"},
}
# They join all others, and nobody includes them.
ABOVE_ALL = {"bindings", "fuzz", "tests"}


def folder_of(path: str) -> str:
    """Returns the folder of a file of csrc/ that has a rule, or its first one."""
    folders = [folder for folder in MAY_INCLUDE if path.startswith(f"{folder}/")]
    return max(folders, key=len, default=path.split("/")[0])


def includes() -> Iterator[tuple[str, str]]:
    """Yields each file of csrc/ with each of ours that it includes."""
    for file in sorted(CSRC.rglob("*")):
        if file.suffix not in {".h", ".cpp", ".inc"}:
            continue
        for included in re.findall(r'^#include "(.*)"$', file.read_text(), re.MULTILINE):
            yield str(file.relative_to(CSRC)), included


def test_includes_point_one_way() -> None:
    wrong = []
    for file, included in includes():
        folder, other = folder_of(file), folder_of(included)
        if folder in ABOVE_ALL or other in {folder, "errors.h"}:
            continue
        if other not in MAY_INCLUDE[folder]:
            wrong.append(f"{file} includes {included}")
    assert not wrong, wrong


def test_files_are_included_by_their_path_in_csrc() -> None:
    wrong = [pair for pair in includes() if not (CSRC / pair[1]).exists()]
    assert not wrong, wrong
