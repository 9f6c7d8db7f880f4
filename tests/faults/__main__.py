"""Plays the fault matrix and prints it as a table: `make faults`."""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.faults.judge import Verdict, examine
from tests.faults.matrix import MATRIX

_LINE = "{:<55} {:>5} {:<34} {:>9} {:>7}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every row went as it says."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--out", type=Path, default=Path("out/faults"), help="folder of the JSON")
    options = parser.parse_args(arguments)
    print(_LINE.format("fault", "ranks", "survivors", "slowest s", "limit s", ""))
    records = []
    for row in MATRIX:
        if options.only not in row.name:
            continue
        verdict = examine(row)
        records.append(record_of(verdict))
        print(line_of(verdict), flush=True)
        for problem in verdict.problems:
            print(f"    {problem}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "faults.json"
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": date, "rows": records}, indent=1) + "\n")
    failed = sum(not record["passed"] for record in records)
    print(f"{len(records)} faults, {failed} not as expected; texts and times are in {path}")
    return 1 if failed or not records else 0


def line_of(verdict: Verdict) -> str:
    """Returns a row of the table."""
    row = verdict.row
    errors = {o.error or "none" for o in verdict.outcomes if o.rank != row.rank}
    passed = "ok" if not verdict.problems else "NOT AS EXPECTED"
    slowest, limit = "", ""
    if row.errors and verdict.seconds:
        slowest, limit = f"{max(verdict.seconds.values()):.3f}", f"{row.limit:g}"
    raised = ", ".join(sorted(error.removesuffix("Error") for error in errors))
    return _LINE.format(row.name, row.world, raised, slowest, limit, passed)


def record_of(verdict: Verdict) -> dict[str, Any]:
    """Returns what became of a row, for JSON."""
    row = verdict.row
    return {
        "name": row.name,
        "fault": str(row.fault),
        "struck_rank": row.rank,
        "iteration": row.iteration,
        "moment": row.moment,
        "ranks": row.world,
        "bound": row.bound,
        "deadline_s": row.deadline,
        "limit_s": row.limit,
        "ends": [
            {
                "rank": outcome.rank,
                "error": outcome.error,
                "message": outcome.message,
                "exit_code": outcome.exit_code,
                "seconds_after_fault": verdict.seconds.get(outcome.rank),
            }
            for outcome in verdict.outcomes
        ],
        "passed": not verdict.problems,
        "problems": verdict.problems,
    }


if __name__ == "__main__":
    sys.exit(main())
