"""Quantized tables of a service: how long they take to load, refresh, attach to and switch to.

One process keeps the tables. It loads a float checkpoint as INT8 rows, and publishes the same
checkpoint with one table of 26 changed. Readers attach one after the other, each killed after its
first answer, and change to whole new versions, at several sizes.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model

from benchmarks.direct.page import service_tables_section
from benchmarks.harness import record
from benchmarks.harness.memory import PeakMemory, give_back, held_bytes, touch
from benchmarks.harness.statistics import Spread
from torchrec_bls import Publication, attach, keeper, serving_state, version_of
from torchrec_bls.checkpoints import open_checkpoint

# GiB of INT8 rows, and of the float checkpoint.
FULL = {"attach_gib": [0.35, 1, 8], "switch_gib": [1, 4], "float_gib": 4, "repetitions": 5}
QUICK = {"attach_gib": [0.01], "switch_gib": [0.01], "float_gib": 0.02, "repetitions": 1}

_TABLES, _DIM, _BATCH = 26, 64, 128
_ROW_BYTES = _DIM + 4  # INT8: scale and shift in front
_STEP = 4 << 20
_CHANGED = _TABLES // 2
_DEADLINE_S = 600.0


class Model(nn.Module):
    """26 bags on the device meta."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=rows,
                    embedding_dim=_DIM,
                    name=f"t{table}",
                    feature_names=[f"f{table}"],
                )
                for table in range(_TABLES)
            ],
        )

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.bags(ids).values()
        return values


def rows_of(gib: float, row_bytes: int) -> int:
    """Rows of each table, so that all take so much."""
    return int(gib * (1 << 30) / _TABLES / row_bytes)


def quantized(rows: int) -> nn.Module:
    """The model with INT8 tables."""
    return quantize_inference_model(Model(rows))


class Filled:
    """Stored rows of one version, bytes that tell it, as a checkpoint has them."""

    dtype, tensor_type, where = torch.uint8, "torch.Tensor", "rows that are made"

    def __init__(self, rows: int, number: int) -> None:
        self.shape = (rows, _ROW_BYTES)
        self._number = number

    def whole(self) -> torch.Tensor:
        return self.read(0, self.shape[0])

    def read(self, first: int, end: int) -> torch.Tensor:
        return torch.full((end - first, _ROW_BYTES), self._number, dtype=torch.uint8)


def _version(rows: int, number: int) -> dict[str, Any]:
    names = [f"bags.embedding_bags.t{table}.weight" for table in range(_TABLES)]
    return {name: Filled(rows, number) for name in names}


def _ids(rows: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(0)
    keys = [f"f{table}" for table in range(_TABLES)]
    values = torch.randint(0, rows, (_TABLES * _BATCH,), generator=generator)
    lengths = torch.ones(_TABLES * _BATCH, dtype=torch.int32)
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def _page_tables_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmPTE")).split()[1])


@contextlib.contextmanager
def process_of(
    work: Callable[..., None], *arguments: Any, pids: list[int] | None = None
) -> Iterator[Any]:
    """Runs work in a fresh process, which has this end of a connection; it is killed at the end.
    Its number is put into `pids`."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    if pids is not None and process.pid is not None:
        pids.append(process.pid)
    try:
        yield here
    finally:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def told_by(connection: Any) -> Any:
    """What a process says next."""
    if not connection.poll(_DEADLINE_S):
        raise RuntimeError(f"no answer within {_DEADLINE_S} s")
    return connection.recv()


def _read(connection: Any, path: str, rows: int) -> None:
    """Attaches and answers a batch, then one of each version that is asked for: it tells how long
    after the publication the first lookup in that version began and ended."""
    torch.set_num_threads(1)  # as the keeper works beside it
    model, ids = quantized(rows), _ids(rows)
    before = _page_tables_kib()
    begin = time.perf_counter()
    attach(model, path)
    attached = time.perf_counter()
    with torch.no_grad():
        model(ids)
        answered = time.perf_counter()
        connection.send(
            {
                "attach_s": attached - begin,
                "first_answer_s": answered - begin,
                "page_tables_kib": _page_tables_kib() - before,
            }
        )
        while True:
            awaited = connection.recv()
            while version_of(model) != awaited:
                asked = time.time()
                model(ids)
            answered = time.time()
            published = serving_state(model).published
            assert published is not None
            connection.send((asked - published, answered - published))


def _keep(connection: Any, path: str, rows: int) -> None:
    """Keeps tables, and publishes whole new versions when it is asked to."""
    kept = keeper(lambda: quantized(rows), _version(rows, 1), path, version="1")
    connection.send("kept")
    while True:
        number = connection.recv()
        kept.publish(_version(rows, number), version=str(number), deadline=_DEADLINE_S)
        connection.send("published")


def measure_size(gib: float, switches: int, attaches: int) -> dict[str, Any]:
    """Attaches and switches at one size of the tables."""
    rows = rows_of(gib, _ROW_BYTES)
    readers: list[dict[str, float]] = []
    switches_s = []
    with tempfile.TemporaryDirectory(prefix="bls-tables-") as folder:
        path = str(Path(folder) / "tables")
        with process_of(_keep, path, rows) as owner:
            told_by(owner)
            for _ in range(attaches):
                with process_of(_read, path, rows) as reader:
                    readers.append(told_by(reader))
            if switches:
                with process_of(_read, path, rows) as reader:
                    told_by(reader)
                    for number in range(2, 2 + switches):
                        reader.send(str(number))
                        owner.send(number)
                        told_by(owner)
                        switches_s.append(told_by(reader))
    result: dict[str, Any] = {"gib": gib}
    for name in readers[0] if readers else ():
        result[name] = Spread([each[name] for each in readers])
    for name, seconds in zip(
        ("switch_s", "switch_answer_s"), zip(*switches_s, strict=True), strict=False
    ):
        result[name] = Spread(list(seconds))
    return result


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write_checkpoint(folder: Path, rows: int, changed: int | None = None) -> None:
    """Writes float tables as safetensors, a file a table. With `changed`, all other files are links
    to those of the folder `first` beside it."""
    folder.mkdir()
    weight_map = {}
    for table in range(_TABLES):
        name, file = f"bags.embedding_bags.t{table}.weight", folder / f"t{table}.safetensors"
        weight_map[name] = file.name
        if changed is not None and table != changed:
            os.link(folder.parent / "first" / file.name, file)
            continue
        generator = torch.Generator().manual_seed(table + 1000 * (changed is not None))
        size = rows * _DIM * 4
        head = {name: {"dtype": "F32", "shape": [rows, _DIM], "data_offsets": [0, size]}}
        text = json.dumps(head).encode()
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for first in range(0, rows, 1 << 16):
                part = torch.randn(min(1 << 16, rows - first), _DIM, generator=generator)
                out.write(part.numpy().tobytes())
    index = {"metadata": {"total_size": _TABLES * rows * _DIM * 4}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_and_hash(folder: Path) -> float:
    """Seconds to read a checkpoint once, in steps, and to hash it."""
    begin = time.perf_counter()
    with open_checkpoint(folder) as weights:
        for name in weights:
            rows, digest = weights[name], hashlib.sha256()
            step = max(1, _STEP // (4 * rows.shape[1]))
            for first in range(0, rows.shape[0], step):
                part = rows.read(first, min(first + step, rows.shape[0]))
                digest.update(part.contiguous().numpy())
    return time.perf_counter() - begin


def _prepare(rows: int, tables: int) -> None:
    """Begins a measurement of memory and time with memory for some float tables at hand, and none
    kept."""
    give_back()
    touch(tables * rows * _DIM * 4)


def _load(connection: Any, folder: str, rows: int, times: int) -> None:
    """Loads a float checkpoint as INT8 rows, then in turn one with a changed table and the first
    one."""
    first, second = Path(folder) / "first", Path(folder) / "second"
    model = quantized(rows)
    _prepare(rows, _TABLES // 2)
    before, used = held_bytes(), _processor_s()
    with PeakMemory() as peak:
        kept = keeper(lambda: model, first, str(Path(folder) / "tables"), version="1")
    result: dict[str, Any] = {
        "load_processor_s": _processor_s() - used,
        "load_peak": peak.bytes - before,
    }
    give_back()
    result["generation"] = held_bytes() - before
    folders = itertools.cycle([second, first])
    versions = itertools.count(2)

    def refresh(folder: Path) -> Publication:
        return kept.publish(folder, version=str(next(versions)), deadline=_DEADLINE_S)

    timed, extra = [], []
    for _ in range(times):
        folder = next(folders)
        hashed = read_and_hash(folder)
        _prepare(rows, 2)
        begin = time.perf_counter()
        publication = refresh(folder)
        seconds = time.perf_counter() - begin
        hashed = (hashed + read_and_hash(folder)) / 2
        timed.append({"refresh_s": seconds, "read_and_hash_s": hashed, "ratio": seconds / hashed})
    for _ in range(times):  # apart, since whoever looks at memory takes time
        _prepare(rows, 2)
        before = held_bytes()
        with PeakMemory() as peak:
            refresh(next(folders))
        extra.append(peak.bytes - before)
    result |= {name: Spread([each[name] for each in timed]) for name in timed[0]}
    result["extra"] = Spread(extra)
    result["written"], result["reused"] = publication.bytes_written, publication.bytes_reused
    connection.send(result)


def _torchrec(connection: Any, folder: str, rows: int) -> None:
    """Loads and quantizes the same checkpoint as TorchRec does: the whole float model first."""
    _prepare(rows, 2 * _TABLES)
    torch.set_num_threads(1)  # others that wait would count
    before, used = held_bytes(), _processor_s()
    with PeakMemory() as peak:
        model = Model(rows)
        with open_checkpoint(Path(folder) / "first") as weights:
            whole = {name: weights[name].read(0, rows) for name in weights}
        model.to_empty(device="cpu")
        model.load_state_dict(whole)
        del whole
        model = quantize_inference_model(model)
    connection.send({"processor_s": _processor_s() - used, "peak": peak.bytes - before})


def measure_load(gib: float, times: int) -> dict[str, Any]:
    """A load, refreshes with one changed table, and TorchRec's quantization."""
    rows = rows_of(gib, 4 * _DIM)
    with tempfile.TemporaryDirectory(prefix="bls-tables-") as folder:
        write_checkpoint(Path(folder) / "first", rows)
        write_checkpoint(Path(folder) / "second", rows, _CHANGED)
        with process_of(_load, folder, rows, times) as process:
            result = told_by(process)
        with process_of(_torchrec, folder, rows) as process:
            result["torchrec"] = told_by(process)
    return {"float_gib": gib, **result}


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, once").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    attach_gib, switch_gib = settings["attach_gib"], settings["switch_gib"]
    times = settings["repetitions"]
    results: list[Any] = [measure_load(settings["float_gib"], times)]
    for gib in sorted({*attach_gib, *switch_gib}):
        switches, attaches = (times if gib in sizes else 0 for sizes in (switch_gib, attach_gib))
        results.append(measure_size(gib, switches, attaches))
    record.publish(
        arguments.json, "service_tables", before, settings, results, service_tables_section
    )


if __name__ == "__main__":
    main()
