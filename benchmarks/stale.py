"""Lists the records whose code has changed since the commit that each names.

Of a record this is its program, and what the program measures by benchmarks/programs.py. A file
that only moved counts as unchanged. No record is out of date by this alone: it says where to look.
"""

import argparse
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import page, record
from benchmarks.programs import PROGRAMS, Program

_CODE = ("csrc", "torchrec_bls", "sharding", "benchmarks")
_NO_CODE = (":!csrc/tests", ":!benchmarks/results", ":!benchmarks/raw", ":!benchmarks/**/*page.py")
# Files that moved are found among so many.
_MOST_MOVED = 5000
_UNKNOWN = "not in this repository"


@dataclass(frozen=True)
class Changed:
    """A file that differs from what it was.

    Attributes:
        path: path of the file; of one that is gone, where it was.
        lines: lines that were added or removed.
    """

    path: str
    lines: int


def changed_since(commit: str, root: Path = ROOT) -> list[Changed] | None:
    """What has changed in the code from a commit to HEAD; None without such a commit."""
    command = ["git", "-C", str(root), "diff", "--numstat", "-z", f"-l{_MOST_MOVED}", "-M"]
    ended = subprocess.run(
        [*command, commit, "HEAD", "--", *_CODE, *_NO_CODE],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if ended.returncode else list(_files(ended.stdout))


def _files(numstat: str) -> Iterable[Changed]:
    fields = iter(numstat.split("\0"))
    for field in fields:
        if not field:
            return
        added, removed, path = field.split("\t")
        if not path:  # It has moved: both names follow.
            path = [next(fields), next(fields)][1]
        # Of binary files there are dashes.
        lines = sum(int(count) for count in (added, removed) if count != "-")
        if lines:
            yield Changed(path, lines)


def changed_of(changed: Iterable[Changed], program: Program) -> list[Changed]:
    """What of it concerns a benchmark."""
    own = f"benchmarks/{program.name.replace('.', '/')}.py"
    return [
        each
        for each in changed
        if each.path == own or any(f"{each.path}/".startswith(f"{m}/") for m in program.measures)
    ]


def commits_of(taken: dict[str, Any]) -> list[str]:
    """The commits that a record names, of all its stages."""
    parts = taken["stages"].values() if "stages" in taken else [taken]
    return sorted({part["environment"]["commit"] for part in parts})


def table(rows: Iterable[Sequence[Any]]) -> str:
    """The records whose code has changed, the most changed first."""
    header = ["record", "commit", "lines changed", "files", "most in"]
    return page.table(header, sorted(rows, key=lambda row: -row[2] if row[3] else -float("inf")))


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    since = cache(changed_since)
    rows = []
    for name, program in PROGRAMS.items():
        for commit in commits_of(record.read(record.RESULTS / f"{name}.json")):
            changed = since(commit.split()[0])
            if changed is None:
                rows.append([name, commit, _UNKNOWN, "", ""])
            elif own := changed_of(changed, program):
                most = max(own, key=lambda each: each.lines)
                lines = sum(each.lines for each in own)
                rows.append([name, commit, lines, len(own), f"{most.path} ({most.lines})"])
    print(table(rows))
    print(f"\n{len({row[0] for row in rows})} of {len(PROGRAMS)} records are of other code.")


if __name__ == "__main__":
    main()
