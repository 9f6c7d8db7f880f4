"""Rows that are refreshed in place: how long deltas take, what memory, and what readers notice.

One process keeps 26 float tables. Two processes read them, batch after batch. Versions come as a
whole, and as deltas of 1 % of the rows, scattered. A delta changes other rows than the one before.
All weights of a row are the number of the version that has changed it last, by which each answer is
compared with the version that it names.
"""

import contextlib
import itertools
import mmap
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torchrec import KeyedJaggedTensor

from benchmarks.direct.page import row_refresh_section
from benchmarks.direct.service_tables import Model, process_of, rows_of, told_by
from benchmarks.harness import record
from benchmarks.harness.statistics import Spread, in_turns
from torchrec_bls import attach, keeper, version_of

FULL = {"gib": 4.0, "percent": 1.0, "wholes": 3, "deltas": 6, "readers": 2}
FULL |= {"rounds": 60, "seconds": 1.0, "every_s": 0.25, "rest_s": 5.0}
FULL |= {"turns": 500}
QUICK = {**FULL, "gib": 0.05, "wholes": 2, "deltas": 3, "rounds": 2, "seconds": 0.4}
QUICK |= {"rest_s": 0.5, "turns": 20}

_TABLES, _DIM, _BATCH = 26, 64, 128
_KEYS = [f"f{table}" for table in range(_TABLES)]
_NAMES = [f"bags.embedding_bags.t{table}.weight" for table in range(_TABLES)]
_ROW_BYTES = 4 * _DIM
# Rows that deltas change in turn.
_SETS = 2
# Between two batches of a reader, which leaves the processor to others.
_PAUSE_S = 0.001
_DEADLINE_S = 120.0
# Of a sample of a forward's price.
_FORWARDS = 200


class Filled:
    """Rows of a table that are all one number, as a checkpoint has them."""

    dtype, tensor_type, where = torch.float32, "torch.Tensor", "rows that are made"

    def __init__(self, rows: int, number: int) -> None:
        self.shape = (rows, _DIM)
        self._number = number

    def whole(self) -> torch.Tensor:
        return self.read(0, self.shape[0])

    def read(self, first: int, end: int) -> torch.Tensor:
        return torch.full((end - first, _DIM), float(self._number))


def _changed(rows: int, percent: float) -> list[torch.Tensor]:
    """Ids that deltas of each kind change, [tables, ids]: whole batches, and no id twice."""
    generator = torch.Generator().manual_seed(0)
    batches = max(1, round(rows * percent / 100 / _BATCH))
    drawn = [
        torch.randperm(rows, generator=generator)[: _SETS * batches * _BATCH]
        for _ in range(_TABLES)
    ]
    return list(torch.stack(drawn).chunk(_SETS, dim=1))


def _delta(changed: list[torch.Tensor], number: int) -> dict[str, Any]:
    ids = changed[number % _SETS]
    rows = torch.full((ids.shape[1], _DIM), float(number))
    return {name: (of_table, rows.clone()) for name, of_table in zip(_NAMES, ids, strict=True)}


def _name(number: int, whole: int) -> str:
    """A version, and the last one that came as a whole."""
    return f"{number} after {whole}"


def _expected(version: str, of_set: int) -> int:
    """The number in all weights of the rows that deltas of a kind change."""
    number, whole = map(int, version.split(" after "))
    return max(whole, number - (number - of_set) % _SETS)


# What the processes do.


def _keep(connection: Any, path: str, settings: dict[str, Any]) -> None:
    """Keeps the tables, and publishes what it is asked to: it tells when each call began."""
    torch.set_num_threads(1)
    rows = rows_of(settings["gib"], _ROW_BYTES)
    changed = _changed(rows, settings["percent"])

    def whole(number: int) -> dict[str, Any]:
        return {name: Filled(rows, number) for name in _NAMES}

    kept = keeper(lambda: Model(rows), whole(1), path, version=_name(1, 1))
    connection.send("kept")
    while True:
        kind, number, of_whole = connection.recv()
        version, base = _name(number, of_whole), kept.version
        delta = _delta(changed, number)
        begin = time.monotonic()
        if kind == "whole":
            kept.publish(whole(number), version=version, deadline=_DEADLINE_S)
        else:
            kept.publish_rows(delta, version=version, base=base, deadline=_DEADLINE_S)
        connection.send(begin)


def _read(connection: Any, path: str, settings: dict[str, Any]) -> None:
    """Looks batches up without an end. Whoever asks is told when the first batch of each version
    had ended since, and how long all batches took, ms."""
    torch.set_num_threads(1)
    rows = rows_of(settings["gib"], _ROW_BYTES)
    model = Model(rows)
    attach(model, path)
    lengths = torch.ones(_TABLES * _BATCH, dtype=torch.int32)
    batches = [
        (of_set, KeyedJaggedTensor(_KEYS, ids.reshape(-1), lengths=lengths))
        for of_set, ids_of_set in enumerate(_changed(rows, settings["percent"]))
        for ids in ids_of_set.split(_BATCH, dim=1)
    ]
    connection.send("attached")
    first: dict[str, float] = {}
    spent: list[float] = []
    with torch.no_grad():
        for of_set, ids in itertools.cycle(batches):
            begin = time.perf_counter()
            values = model(ids)
            spent.append((time.perf_counter() - begin) * 1e3)
            version = version_of(model)
            first.setdefault(version, time.monotonic())
            if not bool((values == _expected(version, of_set)).all()):
                raise RuntimeError(f"an answer is not of version {version}")
            if connection.poll():
                connection.recv()
                connection.send((first, spent))
                first, spent = {}, []
            time.sleep(_PAUSE_S)


def _write(connection: Any, settings: dict[str, Any]) -> None:
    """Writes as many rows as a delta does, to both of two copies that are nobody's: it tells how
    long that took."""
    torch.set_num_threads(1)
    rows = rows_of(settings["gib"], _ROW_BYTES)
    changed = _changed(rows, settings["percent"])
    size = _TABLES * rows * _ROW_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tables = torch.frombuffer(memory, dtype=torch.float32).view(_TABLES, rows, _DIM)
    tables.fill_(1)
    connection.send("ready")
    while True:
        number = connection.recv()
        pairs = [_delta(changed, each) for each in (number, number + 1)]
        begin = time.monotonic()
        for delta in pairs:
            for table, (ids, values) in zip(tables, delta.values(), strict=True):
                table[ids] = values
        connection.send(time.monotonic() - begin)


def _pin(connection: Any, turns: int) -> None:
    """Calls a small model whose version stays as it is, and one whose rows may be written over, in
    turn: it tells ns of the processor for a forward of each."""
    torch.set_num_threads(1)
    rows = 10

    def kept_at(path: Path) -> Any:
        whole = {name: Filled(rows, 1) for name in _NAMES}
        return keeper(lambda: Model(rows), whole, path, version=_name(1, 1))

    ids = KeyedJaggedTensor(
        _KEYS, torch.zeros(_TABLES).long(), lengths=torch.ones(_TABLES, dtype=torch.int32)
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        whole, refreshed = (kept_at(Path(folder) / name) for name in ("whole", "rows"))
        delta = {name: (torch.zeros(1).long(), torch.ones(1, _DIM)) for name in _NAMES}
        refreshed.publish_rows(delta, version=_name(2, 1), base=_name(1, 1))

        def forward(kept: Any) -> float:
            begin = time.thread_time_ns()
            for _ in range(_FORWARDS):
                kept.model(ids)
            return (time.thread_time_ns() - begin) / _FORWARDS

        samplers = {"whole": partial(forward, whole), "rows": partial(forward, refreshed)}
        connection.send(in_turns(samplers, turns))
        whole.close()
        refreshed.close()


# What is asked of them.


class Tables:
    """A keeper and its readers."""

    def __init__(self, owner: Any, readers: list[Any]) -> None:
        self._owner, self._readers = owner, readers
        self._number = self._whole = 1
        self._spent: list[float] = []

    def publish(self, kind: str) -> float:
        """Publishes the next version. Returns the seconds until all readers have had a batch of
        it."""
        self._number += 1
        if kind == "whole":
            self._whole = self._number
        self._owner.send((kind, self._number, self._whole))
        begin: float = told_by(self._owner)
        version, end = _name(self._number, self._whole), 0.0
        for reader in self._readers:
            found: dict[str, float] = {}
            while version not in found:
                found = self._asked(reader)
            end = max(end, found[version])
        return end - begin

    def ask(self) -> None:
        """Asks the readers as often as `publish` does at least."""
        for reader in self._readers:
            self._asked(reader)

    def batches(self) -> Any:
        """How long each batch since the last call took, ms."""
        self.ask()
        spent, self._spent = self._spent, []
        return np.array(spent)

    def _asked(self, reader: Any) -> dict[str, float]:
        reader.send("tell")
        first: dict[str, float]
        first, spent = told_by(reader)
        self._spent += spent
        return first


@contextlib.contextmanager
def _tables(settings: dict[str, Any], pids: list[int]) -> Iterator[Tables]:
    """A keeper and its readers; their processes are put into `pids`."""
    with contextlib.ExitStack() as stack:
        path = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tables")
        owner = stack.enter_context(process_of(_keep, path, settings, pids=pids))
        told_by(owner)
        readers = []
        for _ in range(settings["readers"]):
            readers.append(stack.enter_context(process_of(_read, path, settings, pids=pids)))
            told_by(readers[-1])
        yield Tables(owner, readers)


def _shared_bytes(pids: list[int]) -> int:
    """Bytes of all memory files that these processes have."""
    files = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                if str(descriptor.readlink()).startswith("/memfd:"):
                    found = descriptor.stat()
                    files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Whole versions, each followed by deltas; and batches beside deltas and beside writes."""
    pids: list[int] = []
    with process_of(_pin, settings["turns"]) as process:
        forwards = told_by(process)
    wholes, firsts, seconds, later, memory = [], [], [], [], []
    times: dict[str, list[Any]] = {"writes": [], "deltas": []}
    with process_of(_write, settings, pids=[]) as writer:
        told_by(writer)
        # Before the others, so that nobody else uses the processor.
        written = [_written(writer, number) for number in range(settings["deltas"] + 1)][1:]
        with _tables(settings, pids) as tables:
            for _ in range(settings["wholes"]):
                wholes.append(tables.publish("whole"))
                time.sleep(settings["rest_s"])  # the version before is unmapped
                deltas = [tables.publish("delta")]
                time.sleep(settings["rest_s"])  # it maps the other side, too
                for _ in range(settings["deltas"]):
                    deltas.append(tables.publish("delta"))
                    time.sleep(settings["seconds"])
                firsts.append(deltas[0])
                seconds.append(deltas[1])
                later += deltas[1:]
                memory.append(_shared_bytes(pids))
            for number in range(settings["rounds"]):
                for kind, each in times.items():
                    tables.batches()
                    end = time.monotonic() + settings["seconds"]
                    while (now := time.monotonic()) < end:
                        if kind == "deltas":
                            tables.publish("delta")
                        else:
                            _written(writer, number)
                            tables.ask()
                        time.sleep(max(0.0, now + settings["every_s"] - time.monotonic()))
                    each.append(tables.batches())
    rows = rows_of(settings["gib"], _ROW_BYTES)
    return {
        "whole_s": Spread(wholes),
        "first_delta_s": Spread(firsts),
        "second_delta_s": Spread(seconds),
        "delta_s": Spread(later),
        "written_s": Spread(written),
        "memory_times": max(memory) / (_TABLES * rows * _ROW_BYTES),
        "batches": {
            kind: {
                "count": sum(map(len, each)),
                **{
                    f"p{percent:g}": float(np.percentile(np.concatenate(each), percent))
                    for percent in (50, 99, 99.9)
                },
            }
            for kind, each in times.items()
        },
        "forward_ns": forwards,
        "over_writes_p99_9": _ratio(times["writes"], times["deltas"]),
    }


def _written(writer: Any, number: int) -> float:
    writer.send(number)
    seconds: float = told_by(writer)
    return seconds


def _ratio(without: list[Any], beside: list[Any]) -> tuple[float, float, float]:
    """p99.9 beside deltas over that beside writes, with its 95 % interval by bootstrap over
    rounds."""

    def ratio(rounds: Any) -> float:
        before, after = (np.concatenate([of[i] for i in rounds]) for of in (without, beside))
        return float(np.percentile(after, 99.9) / np.percentile(before, 99.9))

    every = np.arange(len(without))
    found = stats.bootstrap(
        (every,), ratio, n_resamples=1000, method="percentile", vectorized=False, rng=0
    ).confidence_interval
    return float(found.low), ratio(every), float(found.high)


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, few versions").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = measure(settings)
    record.publish(arguments.json, "row_refresh", before, settings, results, row_refresh_section)


if __name__ == "__main__":
    main()
