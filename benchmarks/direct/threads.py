"""What a second thread adds to the lookups of one process, which both call one model."""

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.direct.latency import sharded_model
from benchmarks.direct.page import threads_section
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import Spread, taking_turns
from benchmarks.modules.models import Case, ids_of

_BATCHES = 50
_ROWS = 50_000  # 330 MB of tables: more than a cache has
FULL = {"seconds": 0.5, "turns": 15, "batches": [1, 8, 64, 512, 2048]}
QUICK = {"seconds": 0.05, "turns": 2, "batches": [64]}


def cases(batches: list[int]) -> list[Case]:
    kinds = (("EBC", 20), ("EBC", 1), ("EC", 1))
    return [
        Case(module, "table_wise", 1, batch, ids=ids, rows=_ROWS)
        for (module, ids), batch in itertools.product(kinds, batches)
    ]


def measure(rank: int, case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """Counts the forwards a second of one thread and of two, in turns."""
    torch.set_num_threads(1)
    model = sharded_model(case)
    batches = [ids_of(case, rank, seed) for seed in range(_BATCHES)]
    with torch.no_grad():
        model(batches[0]).wait()

    def forward(number: int) -> None:
        model(batches[number % _BATCHES]).wait()

    rates = taking_turns(
        {count: partial(_rate, forward, count, settings["seconds"]) for count in (1, 2)},
        settings["turns"],
    )
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        **{k: v for k, v in case._asdict().items() if v != case._field_defaults.get(k)},
        "one": Spread(rates[1]),
        "two": Spread(rates[2]),
        "ratio": Spread(ratios),
    }


def _rate(forward: Callable[[int], None], threads: int, seconds: float) -> float:
    """Returns the forwards a second of all threads together."""
    counts = [0] * threads
    begin = threading.Barrier(threads)
    ends = [0.0] * threads
    begins = [0.0] * threads

    def call(thread: int) -> None:
        with torch.no_grad():
            begin.wait()
            begins[thread] = now = time.perf_counter()
            end = now + seconds
            while now < end:
                forward(thread * _BATCHES // threads + counts[thread])
                counts[thread] += 1
                now = time.perf_counter()
            ends[thread] = now

    callers = [threading.Thread(target=call, args=(thread,)) for thread in range(threads)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    return sum(counts) / (max(ends) - min(begins))


def main() -> None:
    arguments = record.parser(__doc__, quick="few batches").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = [on_ranks(1, measure, case, settings) for case in cases(settings["batches"])]
    record.publish(arguments.json, "direct_threads", before, settings, results, threads_section)


if __name__ == "__main__":
    main()
