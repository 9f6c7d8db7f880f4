"""What a GPU's driver lets host tables do: which memory registers, and how fast a GPU reads it.

From the repository's root, with torch 2.11 or later and nothing else:

    python3 -m benchmarks.gpu.probe --json benchmarks/results/gpu_probe.json

It ends within three minutes, with tables. Its exit code is 1 if nothing could be registered or if a
row that a GPU read was wrong. Without a GPU it says so and ends with 1 as well. The file is written
after each step.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import facts, gathers, memory, peers, registrations
from benchmarks.gpu.children import Case, ChildError, Open
from benchmarks.gpu.runtime import Runtime
from benchmarks.gpu.steps import Steps
from benchmarks.gpu.table import problems, tables

_GIB = 2**30
# How tables could be mapped and registered, in the order of preference.
_FORMS = ("sealed", "sealed, read-only flag", "guarded")


def settings() -> dict[str, Any]:
    """Sizes in bytes; the largest table takes at most a share of what the host has left."""
    largest = min(40 * _GIB, int(0.4 * memory.memory_left()))
    return {
        "small": _fitting(_GIB, largest),
        "large": _fitting(8 * _GIB, largest),
        "largest": _fitting(40 * _GIB, largest),
        # 512 bags of 26 tables with one row of 256 bytes each, and far more than caches hold.
        "moved": [512 * 26 * 256, 64 << 20],
        "block_counts": [1, 2, 4, 8, 16, 32, 64],
        "few_block_counts": [4, 32],
        "windows": [_GIB, 4 * _GIB, 16 * _GIB],
        "side": 8192,
    }


def _fitting(size: int, most: int) -> int:
    return max(memory.HUGE, min(size, most) // memory.HUGE * memory.HUGE)


class Probe(Steps):
    """The steps in the order of their importance."""

    name = "gpu_probe"

    def run(self) -> list[str]:
        """Runs all steps and returns the problems, which make the exit code 1."""
        if why_not := self._why_no_gpu():
            return [why_not]
        sizes = self._sizes
        small = sizes["small"]
        both = [{"huge": huge} for huge in (True, False)]
        reads = {"moved": sizes["moved"], "block_counts": sizes["block_counts"]}

        self._step("facts", 0, 40, partial(self._cases, facts.measure, [{}], 40))
        ways = [
            {"way": way, **pages, "size": small, "piece": small}
            for pages in both
            for way in registrations.WAYS
        ]
        self._step("registrations", 5, 60, partial(self._cases, registrations.measure, ways, 20))
        made = [{"way": way, "size": small} for way in peers.VMM]
        self._step("vmm", 5, 20, partial(self._cases, peers.measure_vmm, made, 15))
        self._step("second process", 10, 45, self._peers)
        way = {"way": self._form()}
        table = [{**way, **pages, "size": small, "piece": small, **reads} for pages in both]
        self._step("gathers", 10, 60, partial(self._cases, gathers.measure, table, 40))
        beside = {
            **way,
            "huge": True,
            "size": small,
            "block_counts": sizes["block_counts"],
            "side": sizes["side"],
        }
        cases = [{**beside, "moved": max(sizes["moved"])}]
        self._step("beside a GEMM", 8, 40, partial(self._cases, gathers.measure_beside, cases, 30))
        self._step("large registrations", 10, 40, self._large_registrations)
        self._step("large gathers", 20, 90, self._large_gathers)
        return problems(self.results)

    def _peers(self, deadline: float) -> Iterator[Case]:
        """Each form of memory that lets a second process join, if the first one could register."""
        for way in (*self._registered(), *peers.VMM):
            case = {"way": way, "huge": True, "size": self._sizes["small"]}
            until = min(deadline, time.monotonic() + 20)
            try:
                for result in peers.measure(self._open, **case, deadline=until):
                    yield {**case, **result}
            except ChildError as error:
                yield {**case, "failed": str(error)}

    def _large_registrations(self, deadline: float) -> Iterator[Case]:
        """Larger memory in one piece and in several."""
        large, small = self._sizes["large"], self._sizes["small"]
        cases = [
            {"way": self._form(), "huge": huge, "size": large, "piece": piece}
            for huge in (True, False)
            for piece in (large, small)
        ]
        return self._cases(registrations.measure, cases, 30, deadline)

    def _large_gathers(self, deadline: float) -> Iterator[Case]:
        """Gathers from the largest table that half of the time suffices to fill and register."""
        costs = [
            each["fill_s_per_gib"] + 2 * each["register_s_per_gib"]  # both ways
            for each in self.results["gathers"]
            if each.get("what") == "table"
        ]
        time_s = (deadline - time.monotonic()) / 2
        size = _fitting(self._sizes["largest"], int(time_s / sum(costs) * _GIB) if costs else 0)
        large = {
            "way": self._form(),
            "size": size,
            "piece": self._sizes["large"],
            "moved": self._sizes["moved"],
            "block_counts": self._sizes["few_block_counts"],
        }
        places = {"windows": self._sizes["windows"], "orders": list(gathers.ORDERS)}
        cases = [{"huge": True, **large, **places}, {"huge": False, **large}]
        return self._cases(gathers.measure, cases, 60, deadline)

    def _registered(self) -> list[str]:
        """The forms of tables that registered, in the order of preference."""
        cells = self.results.get("registrations", [])
        found = {each["way"] for each in cells if each.get("error") == ""}
        return [way for way in _FORMS if way in found]

    def _form(self) -> str:
        """The form that a table would have here."""
        return (self._registered() or ["anonymous"])[0]


def run(open_runtime: Open, sizes: dict[str, Any], seconds: float, path: Path | None) -> int:
    """Runs the probe, prints its tables, and returns the exit code."""
    probe = Probe(open_runtime, sizes, seconds, path)
    found = probe.run()
    print(tables(probe.environment, probe.results))
    print(
        "\n" + "\n".join(f"FAILED: {each}" for each in found or [])
        if found
        else "\nNo row is wrong."
    )
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--seconds", type=float, default=170, help="what the probe may take")
    arguments = parser.parse_args()
    sys.exit(run(Runtime, settings(), arguments.seconds, arguments.json))


if __name__ == "__main__":
    main()
