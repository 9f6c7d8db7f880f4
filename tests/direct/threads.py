"""Threads that call one model while others publish: python -m tests.direct.threads --seconds 60.

Every output has to be of one of the published weights, in all modules and the dense layer.
"""

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.direct import served
from tests.direct.served import Expected, weights_of
from tests.distributed import models
from tests.processes import run
from torchrec_bls import bounded_lag_modules, publish

DEADLINE = 120.0
# Weights that are published in turn. Those of the first forward are number 1.
CONTENTS = 4
SAMPLES = (1, 7, 64)


def content_of(generation: int) -> int:
    return 1 + (generation - 1) % CONTENTS


class Calls:
    """Threads that look batches up until they are stopped.

    Args:
        model: model that all of them call.
        batches: batches of unequal sizes.
        expected: what they give.
        count: number of threads.
    """

    def __init__(self, model: Any, batches: list[Any], expected: Expected, count: int) -> None:
        self.failures: list[BaseException] = []
        self.outputs = [0] * count
        # Weights of each thread's last output.
        self.last = [0] * count
        self._model, self._batches, self._expected = model, batches, expected
        self._stop = threading.Event()
        self._begin = threading.Barrier(count)
        self._threads = [
            threading.Thread(target=self._call, args=(number,), name=f"caller {number}")
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        try:
            self._begin.wait()  # the first batches come at once
            for turn in itertools.count(number):
                if self._stop.is_set():
                    return
                batch = turn % len(self._batches)
                with torch.no_grad():
                    output = self._model(self._batches[batch])
                self.last[number] = self._content_of(output, batch)
                self.outputs[number] += 1
        except BaseException as error:
            self.failures.append(error)

    def _content_of(self, output: dict[str, torch.Tensor], batch: int) -> int:
        """Returns which weights an output is of, and checks that all of it is."""
        for content in range(1, CONTENTS + 1):
            expected = self._expected.of(content, batch)
            if torch.equal(output["dense"], expected["dense"]):
                models.assert_same_bits(output, expected)
                return content
        raise AssertionError("the dense layer has weights that nobody published")


def call_while_publishing(rank: int, threads: int, seconds: float, every: float) -> int:
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    batches = [
        models.make_ids(models.EBC, seed=10 * rank + samples, samples=samples)
        for samples in SAMPLES
    ]
    expected = Expected(batches)
    for content in range(1, CONTENTS + 1):
        expected.of(content, 0)
    weights = {content: weights_of(content) for content in range(1, CONTENTS + 1)}
    model = served.sharded()
    calls = Calls(model, batches, expected, threads)
    until(lambda: bool(calls.failures) or min(calls.outputs) > 0)
    generation = 1  # of the weights
    end = time.monotonic() + seconds
    while not calls.failures and everybody_goes_on(end):
        generation += 1
        content = content_of(generation)
        publish(model, weights[content], version=f"{generation}", deadline=DEADLINE).wait(DEADLINE)
        publish(model, version=f"{generation} again", deadline=DEADLINE).wait(
            DEADLINE
        )  # the same, from the live weights
        until(lambda content=content: bool(calls.failures) or set(calls.last) == {content})
        time.sleep(every)
    calls.stop()
    if calls.failures:
        raise calls.failures[0]
    check_counts(model, batches, calls.outputs, threads)
    dist.barrier()
    return sum(calls.outputs)


def everybody_goes_on(end: float) -> bool:
    """Ranks publish equally often."""
    goes_on = torch.tensor([int(time.monotonic() < end)])
    dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    return bool(goes_on.item())


def check_counts(model: Any, batches: list[Any], outputs: list[int], threads: int) -> None:
    """All rows that threads have read are counted."""
    calls_of_batch = [0] * len(batches)
    for number in range(threads):
        for turn in range(number, number + outputs[number]):
            calls_of_batch[turn % len(batches)] += 1
    for name, module in bounded_lag_modules(model).items():
        ids = 0
        for batch, calls in zip(batches, calls_of_batch, strict=True):
            lengths = {key: int(batch[key].lengths().sum()) for key in batch.keys()}  # noqa: SIM118
            ids += calls * sum(
                lengths[feature] * parts_of(model, name, table.name)
                for table in module.direct_reads.configs
                for feature in table.feature_names
            )
        assert sum(module.rows_read) == ids, name


def parts_of(model: Any, module: str, table: str) -> int:
    """Returns in how many pieces of columns a table is read."""
    layouts = bounded_lag_modules(model)[module].direct_reads.tables.layouts
    return len(layouts[table].column_pieces())


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the threads do not get on")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.05, help="seconds between publications")
    options = parser.parse_args()
    arguments = options.threads, options.seconds, options.every
    outputs = run(2, call_while_publishing, *arguments, deadline=options.seconds + 300)
    print(f"{sum(outputs)} outputs, none wrong")


if __name__ == "__main__":
    main()
