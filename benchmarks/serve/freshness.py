"""Seconds from a step of a training to the first answers of a service with the rows of that step.

A rank trains the model that is served. After each step, which changes 10^5 rows, it writes a delta
into the directory that the service watches. Callers ask the service all the while, and each answer
is compared with what the training itself gives for the request. What the service says of its own
freshness is beside what callers see.
"""

import contextlib
import multiprocessing
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from benchmarks.harness import record
from benchmarks.harness.statistics import Spread
from benchmarks.serve import model, shape
from benchmarks.serve.encoding import decode, encode
from benchmarks.serve.page import freshness_section
from benchmarks.serve.responses import Response
from benchmarks.serve.service import CORES, Service, served
from benchmarks.serve.traffic import Request, requests
from torchrec_bls import BLSEmbeddingBagCollectionSharder, DeltaWriter

FULL = {"rows": shape.ROWS, "changed": 100_000, "deltas": 20, "every_s": 4.0, "options": []}
QUICK = {
    **{"rows": shape.QUICK_ROWS, "changed": 5_000, "deltas": 2, "every_s": 1.5},
    "options": ["--no-compile"],
}
_WORKERS = 2
# The first delta makes the copies of the tables, and the next one may find them nowhere mapped yet.
_FIRST = 2
# Of callers, so that both workers have some: those who come together may all meet one of them.
_CONNECTIONS, _MOST = 8, 64
# Seconds between two requests, and until a version must have answered.
_PAUSE, _PATIENCE = 0.005, 60.0
_DEADLINE_S = 5.0
# Of scores, which are sums in another order in the training.
_TOLERANCE = 1e-5


class Training:
    """Trains a model on one rank, and writes deltas.

    Args:
        checkpoint: path of the weights that it begins with.
        directory: directory of the deltas.
        request: what callers ask.
        settings: rows of each table, and how many a step changes in all.
    """

    def __init__(
        self, checkpoint: Path, directory: Path, request: Request, settings: dict[str, Any]
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._model = _sharded(model.load(checkpoint, settings["rows"]))
        self._writer = DeltaWriter(self._model, directory)
        self._base: str | None = checkpoint.name
        self._request = request
        self._rows, self._samples = settings["rows"], settings["changed"] // shape.TABLES
        dense = [value for name, value in self._model.named_parameters() if "_arch" in name]
        self._optimizer = torch.optim.SGD(dense, lr=0.1)
        self._generator = torch.Generator().manual_seed(0)

    def step(self, name: str) -> dict[str, Any]:
        """Makes a step, and writes it as a delta.

        Returns:
            The version, when the step and its files were done, and what it answers to the request.
        """
        tables = range(shape.TABLES)
        drawn = [torch.randperm(self._rows, generator=self._generator) for _ in tables]
        ids = torch.cat([each[: self._samples] for each in drawn])
        lengths = torch.ones(len(ids), dtype=torch.int32)
        dense = torch.rand(self._samples, shape.DENSE, generator=self._generator)
        self._optimizer.zero_grad()
        scores = self._model(dense, KeyedJaggedTensor(model.KEYS, ids, lengths=lengths))
        nn.functional.binary_cross_entropy(scores, (dense[:, 0] > 0.5).float()).backward()
        self._optimizer.step()
        trained = time.time()
        version = self._writer.write(name, base=self._base)
        written = time.time()
        self._base = None
        answer = model.scores(self._model, self._request).numpy()
        return {"version": version, "trained": trained, "written": written, "scores": answer}


def _sharded(unsharded: nn.Module) -> DistributedModelParallel:
    sharder = BLSEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    bags = unsharded.dlrm.sparse_arch.embedding_bag_collection  # type: ignore[union-attr]
    plan = construct_module_sharding_plan(
        bags,
        {f"t{table}": table_wise(rank=0, compute_kernel="fused") for table in range(shape.TABLES)},
        sharder=sharder,
        world_size=1,
        local_size=1,
        device_type="cpu",
    )
    plans = ShardingPlan({"dlrm.sparse_arch.embedding_bag_collection": plan})
    return DistributedModelParallel(
        unsharded, device=torch.device("cpu"), plan=plans, sharders=[sharder]
    )


def _train(connection: Any, *arguments: Any) -> None:
    training = Training(*arguments)
    connection.send("ready")
    while True:
        connection.send(training.step(connection.recv()))


@contextlib.contextmanager
def training(*arguments: Any) -> Iterator[Any]:
    """A process that trains: whoever sends it a name gets what `Training.step` returns."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_train, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        yield here
    finally:
        process.kill()
        process.join()


class Callers:
    """Callers of a service who ask one after the other, all the same.

    Args:
        service: the service.
        request: what they ask.
    """

    def __init__(self, service: Service, request: Request) -> None:
        parts = urlsplit(service.url)
        self._address = str(parts.hostname), int(parts.port or 0)
        self._metrics = f"http://{parts.netloc}/metrics"
        self._encoded = encode(request, parts.path, _DEADLINE_S)
        self._connections: list[socket.socket] = []
        while not self._meet_all():
            if len(self._connections) >= _MOST:
                raise RuntimeError(f"{_MOST} callers meet fewer than {_WORKERS} workers")
            self._connections += [
                socket.create_connection(self._address) for _ in range(_CONNECTIONS)
            ]
            for each in self._connections:
                self._ask(each)

    def close(self) -> None:
        for each in self._connections:
            each.close()

    def metric(self, name: str) -> dict[str, float]:
        """A metric of the service by its workers."""
        with urllib.request.urlopen(self._metrics, timeout=_PATIENCE) as reply:
            text = reply.read().decode()
        return {
            sample.labels["worker"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.get("outcome", "ok") == "ok"
        }

    def follow(self, connection: Any, name: str) -> dict[str, Any]:
        """Has a training make a step, and asks until all callers get that version.

        Returns:
            What `Training.step` returns, and when each caller got an answer of it first; and how
            many of these differ from the training's.
        """
        first: dict[tuple[int, str], tuple[float, Any]] = {}
        connection.send(name)
        step: dict[str, Any] = {}
        end = time.monotonic() + _PATIENCE
        while not step or len(self._of(step, first)) < len(self._connections):
            if time.monotonic() > end:
                raise RuntimeError(f"{name} has no answers after {_PATIENCE:g} s")
            for number, each in enumerate(self._connections):
                answer = self._ask(each)
                first.setdefault((number, answer.version), (time.time(), answer.scores))
                time.sleep(_PAUSE)
            if not step and connection.poll():
                step = connection.recv()
        answers = self._of(step, first)
        wrong = sum(
            not np.allclose(scores, step["scores"], rtol=0, atol=_TOLERANCE)
            for _, scores in answers
        )
        return {**step, "answered": [moment for moment, _ in answers], "wrong": wrong}

    def _of(
        self, step: dict[str, Any], first: dict[tuple[int, str], tuple[float, Any]]
    ) -> list[tuple[float, Any]]:
        return [answer for (_, version), answer in first.items() if version == step["version"]]

    def _meet_all(self) -> bool:
        answered = self.metric("torchrec_bls_requests_total") if self._connections else {}
        return sum(count > 0 for count in answered.values()) == _WORKERS

    def _ask(self, connection: socket.socket) -> Any:
        connection.sendall(self._encoded)
        response = Response()
        while not response.add(connection.recv(1 << 16)):
            pass
        if response.status != 200:
            raise RuntimeError(f"a caller got {response.status}: {response.data!r}")
        return decode(response.data)


def measure(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Each delta in its turn, and what the service says of all but the first ones."""
    directory = folder / "watched"
    directory.mkdir()
    checkpoint = directory / "first"
    model.write_checkpoint(checkpoint, settings["rows"])
    [request] = requests(1, settings["rows"])
    build = model.BUILDS[settings["rows"]]["float"]
    options = ["--watch", str(directory), "--workers", str(_WORKERS), *settings["options"]]
    with (
        served(build, checkpoint, *options, cores=CORES) as service,
        training(checkpoint, directory, request, settings) as connection,
        contextlib.closing(Callers(service, request)) as callers,
    ):
        steps = []
        for number in range(_FIRST + settings["deltas"]):
            if number == _FIRST:
                before = _told(callers)
            begin = time.monotonic()
            steps.append(callers.follow(connection, f"step-{number}"))
            time.sleep(max(0.0, begin + settings["every_s"] - time.monotonic()))
        after = _told(callers)
    later = steps[_FIRST:]
    return {
        "written_s": Spread([step["written"] - step["trained"] for step in later]),
        "first_answer_s": Spread([min(step["answered"]) - step["trained"] for step in later]),
        "all_answer_s": Spread([max(step["answered"]) - step["trained"] for step in later]),
        "told_s": {
            worker: (after[worker][1] - before[worker][1]) / (after[worker][0] - before[worker][0])
            for worker in after
        },
        "told": {worker: after[worker][0] - before[worker][0] for worker in after},
        "of_the_first_s": [max(step["answered"]) - step["trained"] for step in steps[:_FIRST]],
        "answers": sum(len(step["answered"]) for step in steps),
        "wrong": sum(step["wrong"] for step in steps),
    }


def _told(callers: Callers) -> dict[str, tuple[float, float]]:
    """How many versions each worker has counted, and the sum of their seconds."""
    counts, sums = (
        callers.metric(f"torchrec_bls_freshness_seconds_{each}") for each in ("count", "sum")
    )
    return {worker: (counts[worker], sums[worker]) for worker in counts}


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, a few deltas").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as name:
        results = measure(Path(name), settings)
    record.publish(
        arguments.json, "serving_freshness", before, settings, results, freshness_section
    )
    if results["wrong"]:
        raise SystemExit("answers differ from those of the training")


if __name__ == "__main__":
    main()
