"""Steps of a run on a GPU, each with a deadline, and the record of what they found."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.gpu import facts
from benchmarks.gpu.children import LEFT_OUT, Case, Open, each_case
from benchmarks.gpu.runtime import Runtime
from benchmarks.gpu.table import Results

# Seconds that are kept for the end: children that are killed, and the tables.
_END_S = 5


class Steps:
    """The steps of a run, and what they found. What a step costs, no other one pays.

    Args:
        open_runtime: makes the Runtime of each process.
        sizes: settings of the run, for the record.
        seconds: that the run may take.
        path: of the record, which is written after each step. None: there is none.

    Attributes:
        results: results by step.
        steps: name, seconds and outcome of each step.
        environment: what the run is on.
    """

    #: Of the record.
    name: ClassVar[str]

    def __init__(
        self, open_runtime: Open, sizes: dict[str, Any], seconds: float, path: Path | None
    ) -> None:
        self._open, self._sizes, self._path = open_runtime, sizes, path
        self._start = time.monotonic()
        self._deadline = self._start + seconds - _END_S
        self.results: Results = {}
        self.steps: list[dict[str, Any]] = []
        self.environment = facts.environment()

    def _why_no_gpu(self) -> str:
        """Tries to use the GPU. Returns why it can't be; empty if it can."""
        self._step("GPU", 0, 60, partial(self._cases, _open_only, [{}], 60))
        failed = [each["failed"] for each in self.results["GPU"] if "failed" in each]
        return f"no GPU could be used: {failed[0]}" if failed else ""

    def _step(
        self, name: str, least_s: float, most_s: float, results: Callable[[float], Iterator[Case]]
    ) -> None:
        """Runs a step up to a deadline and keeps what it yields, also if it raises.

        Args:
            name: of the step.
            least_s: it is left out if less time is left.
            most_s: its deadline.
            results: called with the deadline.
        """
        found, start = self.results.setdefault(name, []), time.monotonic()
        outcome = "done"
        if self._deadline - start < least_s:
            outcome = LEFT_OUT
            found.append({"failed": outcome})
        else:
            try:
                for result in results(min(self._deadline, start + most_s)):
                    found.append(result)
                    if "blocks" not in result:  # as many as all others
                        _say(f"{name}: {_brief(result)}")
            except Exception as error:  # the other steps go on
                outcome = f"failed: {type(error).__name__}: {error}"
                found.append({"failed": outcome})
        seconds = time.monotonic() - start
        self.steps.append({"step": name, "seconds": round(seconds, 1), "outcome": outcome})
        _say(f"{name}: {outcome} after {seconds:.1f} s, {start - self._start:.0f} s into the run")
        self.write()

    def _cases(
        self,
        work: Callable[..., Iterator[Case]],
        cases: list[Case],
        case_s: float,
        deadline: float,
    ) -> Iterator[Case]:
        return each_case(self._open, work, cases, case_s, deadline)

    def write(self) -> None:
        """Writes all that is known, as a whole."""
        if self._path is None:
            return
        record = {
            "benchmark": self.name,
            "environment": self.environment,
            "settings": self._sizes,
            "steps": self.steps,
            "results": self.results,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{self._path.name}.new")
        unfinished.write_text(json.dumps(_rounded(record), indent=1) + "\n")
        unfinished.replace(self._path)


def _open_only(runtime: Runtime) -> Iterator[Case]:
    yield runtime.card()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _brief(result: Case) -> str:
    shown = (
        "way",
        "what",
        "huge",
        "piece",
        "row_bytes",
        "window",
        "order",
        "blocks",
        "bytes",
        "gb_per_s",
        "s_per_gib",
    )
    shown += ("error", "wrong_rows", "gemm_slower", "reads_slower", "failed", "gpu")
    return ", ".join(f"{key} {_rounded(result[key])}" for key in shown if key in result)


def _rounded(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return float(f"{tree:.5g}") if isinstance(tree, float) else tree
