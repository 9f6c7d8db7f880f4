"""Reading the small text files of /proc and /sys."""

from pathlib import Path


def read(path: Path) -> str | None:
    """Returns the text of a file without its newline; None where it can't be read. Even a file that
    exists may refuse it, as that of an unused GID does."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def numbered(folder: Path, prefix: str = "") -> list[Path]:
    """Returns the entries of `folder` named `prefix` and a number, by number. Without the folder
    there are none."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    numbers = sorted(
        int(name.removeprefix(prefix))
        for name in names
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    )
    return [folder / f"{prefix}{number}" for number in numbers]


def parse_cpu_list(text: str) -> set[int]:
    """Returns the numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
