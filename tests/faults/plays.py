"""What the ranks do when the fault strikes."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import table_wise

from tests.distributed import models
from tests.distributed.pipeline.test_torchrec_pipelines import sharded
from tests.distributed.test_reshard import batch_of, by_key, new_plan
from tests.faults.memory import kept_records
from tests.faults.row import LeaveError, Row, Scene
from torchrec_bls import (
    BLSConfig,
    BLSOptions,
    BoundedLagChannel,
    BoundedLagPipeline,
    CodecConfig,
)
from torchrec_bls.errors import PipelineError

ITERATIONS = 8
REQUESTS = 20
SLOT_BYTES = 4096


def play(rank: int, row: Row, folder: Path) -> None:
    """Plays one rank of `row` and notes when it ended."""
    assert dist.group.WORLD is not None
    # A rank without descriptors could not open it any more.
    with (folder / f"end of {rank}").open("w") as end:
        arguments = {
            "bound": row.bound,
            "slot_bytes": SLOT_BYTES,
            "deadline": row.deadline,
            "name": "exchange",
            **dict(row.arguments),
        }
        group: Any = _GroupWithStore(dist.group.WORLD, folder) if row.own_store else None
        scene = Scene(row, rank, group or dist.group.WORLD, folder, arguments)
        try:
            # Damage finds its slot by the records of the set-up, long after these are forgotten.
            with kept_records():
                (row.play or exchange)(scene)
        except LeaveError:
            pass
        finally:
            end.write(repr(time.monotonic()))


class _GroupWithStore:
    """A process group with the store that listens on the port noted in `folder`."""

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        self._group = group
        port = int((folder / "store port").read_text())
        self._store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        dist.barrier()  # or it may be dead before all ranks know it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def get_group_store(self) -> dist.Store:
        return self._store


def exchange(scene: Scene) -> None:
    """Stamped messages over one channel, as far ahead as the bound allows."""
    row = scene.row
    scene.reach("create")
    with scene.stack:
        channel = scene.stack.enter_context(BoundedLagChannel(scene.group, **scene.arguments))
        scene.channel = channel
        for iteration in range(ITERATIONS):
            scene.reach("post", iteration)
            channel.post([[_stamped(row, scene.rank, iteration)]] * row.world)
            scene.reach("wait", iteration)
            if iteration >= row.bound:
                _read(scene, iteration - row.bound)
        for iteration in range(ITERATIONS - row.bound, ITERATIONS):
            _read(scene, iteration)


def leave_unread(scene: Scene) -> None:
    """The struck rank closes its channel while the others still have to fetch what it posted."""
    row = scene.row
    with scene.stack:
        channel = scene.stack.enter_context(BoundedLagChannel(scene.group, **scene.arguments))
        scene.channel = channel
        for iteration in range(ITERATIONS):
            channel.post([[_stamped(row, scene.rank, iteration)]] * row.world)
            if iteration == 0:
                scene.reach("close")
                if scene.rank == row.rank:
                    return
            _read(scene, iteration)


def _stamped(row: Row, rank: int, iteration: int) -> torch.Tensor:
    return torch.full((row.items,), 1000 * rank + iteration)


def _read(scene: Scene, iteration: int) -> None:
    row = scene.row
    assert scene.channel is not None
    with scene.channel.wait() as arrival:
        scene.arrival = arrival
        scene.reach("read", iteration)
        for rank in range(row.world):
            assert torch.equal(
                arrival.tensor(rank, 0, torch.int64), _stamped(row, rank, iteration)
            ), f"iteration {iteration}: wrong data from rank {rank}"


def pipeline(scene: Scene) -> None:
    """A sharded model in a pipeline. The fault finds the channel of the ids, or of the row's
    "direction"."""
    scene.reach("create")
    transport = scene.arguments.get("transport", "auto")
    codec = scene.arguments.get("codec")
    config = BLSConfig(
        bound=scene.row.bound,
        deadline=scene.row.deadline,
        transport=transport,
        codecs=None if codec is None else CodecConfig(forward=codec),
    )
    model = models.shard(
        models.EBC, scene.arguments.get("plan", "table_wise"), models.EBC.bls_sharder(config)
    )
    finished = 0
    model.register_forward_pre_hook(lambda *_: scene.reach("forward", finished))
    batches = iter(
        models.Batch(models.make_ids(models.EBC, seed, samples=4)) for seed in range(ITERATIONS)
    )
    pipe = BoundedLagPipeline[models.Batch, Any](model)
    while finished < ITERATIONS:
        scene.reach("between", finished)
        output = pipe.progress(batches)
        scene.reach("output", finished)
        models.flatten(output)
        finished += 1
        if scene.channel is None:
            (embeddings,) = model.module.children()
            direction = scene.arguments.get("direction", "ids")
            name = next(n for n in embeddings.channels() if n.endswith(f".{direction}"))
            scene.channel = embeddings.channels()[name]


def serve(scene: Scene) -> None:
    """Requests through a pipeline, each answered by what a model without lag gives for it, of one
    version of the weights. The fault may change a request, which then has an error for an answer,
    or end them. With the argument "refresh" each rank has other weights ready at some time."""
    config = BLSConfig(
        bound=scene.row.bound,
        deadline=scene.row.deadline,
        transport=scene.arguments.get("transport", "auto"),
    )
    requests = [
        models.Batch(models.make_ids(models.EBC, 100 * scene.rank + i, samples=4))
        for i in range(REQUESTS)
    ]
    twin = models.shard(
        models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(deadline=scene.row.deadline))
    )
    expected = []
    for _ in range(2):
        with torch.no_grad():
            expected.append([models.flatten(twin(request)) for request in requests])
        refresh(twin)
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    pipe = BoundedLagPipeline[models.Batch, Any](model)
    sent: list[bool] = []  # whether as it should be
    model.register_forward_pre_hook(lambda *_: scene.reach("forward", len(answers)))

    def source() -> Iterator[models.Batch]:
        for number, request in enumerate(requests):
            scene.request = request
            scene.reach("request", number)
            if scene.request is None:
                return
            sent.append(scene.request is request)
            yield scene.request

    answers: list[Any] = []
    versions = []
    batches = source()
    while True:
        if scene.arguments.get("refresh") and len(answers) == scene.row.iteration - scene.rank:
            pipe.update(lambda: refresh(model))
        try:
            answers.append(models.flatten(pipe.progress(batches)))
            versions.append(_version(answers[-1], expected, len(answers) - 1))
        except PipelineError as error:
            answers.append(error)
        except StopIteration:
            break
    assert len(answers) == len(sent), f"{len(answers)} answers for {len(sent)} requests"
    assert versions == sorted(versions), f"versions go back: {versions}"
    assert versions[-1:] == [int("refresh" in scene.arguments)][: len(versions)]
    failed = [answer for answer in answers if isinstance(answer, PipelineError)]
    assert len(failed) == (scene.row.end_of_request is not None and scene.rank == scene.row.rank)
    for error in failed:
        assert type(error).__name__ == scene.row.end_of_request, repr(error)
        assert error.iteration == scene.row.iteration


def move(scene: Scene) -> None:
    """Forwards of a model whose tables go to other ranks between two of them, each with the rows of
    a model whose tables stay. "by" is how many ranks further they go."""
    config = BLSConfig(
        bound=0, deadline=scene.row.deadline, transport=scene.arguments.get("transport", "auto")
    )
    model, unmoved = (
        sharded(models.EBC, "table_wise", models.EBC.bls_sharder(replace(config, name=name)))
        for name in ("moved", "unmoved")
    )
    with torch.no_grad():
        for iteration in range(ITERATIONS):
            scene.reach("reshard", iteration)
            if iteration == scene.row.iteration:
                by = scene.arguments.get("by", 1)
                tables = {
                    f"t{i}": table_wise((i + by) % scene.row.world, compute_kernel="fused")
                    for i in range(models.EBC.tables)
                }
                model.reshard({"embeddings": (0.0, new_plan(models.EBC, tables))}, "embeddings")
            batch = batch_of(models.EBC, scene.rank, iteration)
            answer, expected = by_key(model(batch)[1]), by_key(unmoved(batch)[1])
            models.assert_same_bits(answer, expected)


def reduce(scene: Scene) -> None:
    """All-reduces of the backend, of as many "dtype" as the row's "items" says."""
    options = BLSOptions(deadline=scene.row.deadline)
    group = dist.new_group(backend="bls", pg_options=options)
    dist.all_reduce(torch.zeros(1), group=group)
    for iteration in range(ITERATIONS):
        scene.reach("post", iteration)
        items = scene.arguments.get("items", scene.row.items)
        dtype = scene.arguments.get("dtype", torch.float32)
        terms = torch.full((items,), scene.rank + iteration, dtype=dtype)
        dist.all_reduce(terms, group=group)
        expected = sum(rank + iteration for rank in range(scene.row.world))
        assert torch.equal(terms, torch.full_like(terms, expected))


def refresh(model: Any) -> None:
    """Gives this rank's rows other values."""
    for _, _, shard_ in models.local_shards(model).values():
        shard_.mul_(-2)


def _version(answer: dict[str, torch.Tensor], expected: list[Any], number: int) -> int:
    of = [
        version
        for version, answers in enumerate(expected)
        if all(torch.equal(answer[name], answers[number][name]) for name in answer)
    ]
    assert len(of) == 1, f"answer {number} is of the versions {of}"
    return of[0]
