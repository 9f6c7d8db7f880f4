"""Serving that survives the death of ranks: one is killed, and only that one starts again.

    python examples/supervised_serving.py --ranks 3 --kill 1:20

torchrun starts all ranks again when one of them dies. Here the others go on with the tables of the
dead rank, which are in shared memory. A new process takes its place and maps these tables from one
of the others. Then all ranks publish new weights, the new process as well. A reader without a rank
follows them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROCESS = Path(__file__).with_name("serving_process.py")
BATCHES_OF_LAST = 20  # of each process in version 2, before all end
DEADLINE_S = 240.0


class Served:
    """What one rank, or the reader, has served so far, over all processes that it has had."""

    def __init__(self, name: str, rank: int | None) -> None:
        self.name = name
        self.rank = rank
        self.process: subprocess.Popen[str] | None = None
        self.answers: Counter[str] = Counter()
        self.next_step = 0
        self.starts: list[float] = []
        self.without: set[int] = set()

    def tell(self, order: str) -> None:
        """Tells the process something."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()


class Supervisor:
    """Starts processes, and starts again those that die."""

    def __init__(self, ranks: int, kill: str | None, folder: str) -> None:
        self._folder = folder
        self._kill = kill
        self._ranks = [Served(f"rank {rank}", rank) for rank in range(ranks)]
        self._reader = Served("reader", None)
        self._all = [*self._ranks, self._reader]
        self._said: queue.Queue[tuple[Served, subprocess.Popen[str], str]] = queue.Queue()
        self._published = False
        self._gone: Served | None = None

    def run(self) -> None:
        """Serves until all have answered enough batches of version 2."""
        end = time.monotonic() + DEADLINE_S
        try:
            for served in self._ranks:
                self._start(served, [])
            while not self._have_all_answered():
                served, process, line = self._said.get(timeout=max(0.0, end - time.monotonic()))
                if process is not served.process:
                    continue  # of the one that was before it
                if line:
                    self._note(served, json.loads(line))
                else:
                    self._start_again(served)
            for served in self._all:
                served.tell("end")
            for served in self._all:
                assert served.process is not None
                assert served.process.wait(max(0.1, end - time.monotonic())) == 0, served.name
        finally:
            for served in self._all:
                if served.process is not None:
                    served.process.kill()
                    served.process.wait()

    def _start(self, served: Served, sources: list[Served]) -> None:
        command = [sys.executable, str(PROCESS), "--name", served.name, "--folder", self._folder]
        command += ["--ranks", str(len(self._ranks)), "--first", str(served.next_step)]
        if served.rank is not None:
            command += ["--rank", str(served.rank)]
        if sources:
            command += ["--attach", *(f"{self._folder}/{each.name}" for each in sources)]
        served.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, args=(served, served.process), daemon=True).start()

    def _listen(self, served: Served, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.put((served, process, line))
        self._said.put((served, process, ""))

    def _start_again(self, served: Served) -> None:
        assert served.process is not None
        code = served.process.wait()
        if code != -signal.SIGKILL or self._gone is not None:
            raise SystemExit(f"{served.name} ended with exit code {code}: see its output")
        print(f"{served.name} was killed after {served.answers.total()} batches", flush=True)
        self._gone = served
        self._start(served, self._sources())

    def _sources(self) -> list[Served]:
        """Returns those that live and have answered, and so offer their tables."""
        return [
            each
            for each in self._all
            if each.starts and each.process is not None and each.process.poll() is None
        ]

    def _note(self, served: Served, said: dict[str, Any]) -> None:
        served.answers[said["version"]] += 1
        served.next_step = said["step"] + 1
        served.without |= set(said["without"])
        if "start_s" in said:
            served.starts.append(said["start_s"])
            self._all_serve_more()
        if self._kill == f"{served.rank}:{said['step']}" and len(served.starts) == 1:
            assert served.process is not None
            os.kill(served.process.pid, signal.SIGKILL)

    def _all_serve_more(self) -> None:
        """Starts the reader once all ranks serve, and publishes once all that should do."""
        if self._reader.process is None and all(each.starts for each in self._ranks):
            self._start(self._reader, self._sources())
        has_returned = self._kill is None or (self._gone is not None and len(self._gone.starts) > 1)
        if self._reader.starts and has_returned and not self._published:
            self._published = True
            for served in self._ranks:
                served.tell("publish 2")

    def _have_all_answered(self) -> bool:
        return all(each.answers["2"] >= BATCHES_OF_LAST for each in self._all)

    def report(self) -> None:
        """Prints what each rank has served."""
        for served in self._all:
            batches = ", ".join(
                f"{count} of version {version}" for version, count in sorted(served.answers.items())
            )
            without = f"; without the owners {sorted(served.without)}" if served.without else ""
            print(f"{served.name}: {batches} batches, all checked{without}")
            for start_s in served.starts[1:]:
                print(f"{served.name} was back: first answer {start_s} s after its imports")


def main() -> None:
    """Reads the command line and supervises."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=3, help="processes that have the tables")
    parser.add_argument("--kill", metavar="RANK:STEP", help="kill a rank after one of its batches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(options.ranks, options.kill, folder)
        supervisor.run()
    supervisor.report()


if __name__ == "__main__":
    main()
