"""Modules that read all ranks' tables: what they refuse, and that they wait for nobody."""

import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.processes import run, run_outcomes
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BoundedLagPipeline
from torchrec_bls.errors import BadBatchError, PipelineError

KINDS = (models.EC, models.EBC, models.WEIGHTED)


def make(
    kind: models.Kind = models.EBC, lookup: str = "direct", sharding: str = "mixed", **config: Any
) -> DistributedModelParallel:
    return models.shard(kind, sharding, kind.bls_sharder(BLSConfig(lookup=lookup, **config)))


def outputs(model: DistributedModelParallel, *ids: Any) -> list[dict[str, torch.Tensor]]:
    with torch.no_grad():
        return [models.flatten(model(models.Batch(each))) for each in ids]


def answer_alone(rank: int) -> None:
    for kind in KINDS:
        batches = [models.make_ids(kind, seed, 4) for seed in range(5)]
        expected = outputs(make(kind, "exchange"), *batches)
        model = make(kind)
        outputs(model, batches[0])
        dist.barrier()
        if rank == 1:
            # Nobody else is in a forward, and there is no channel.
            for ours, theirs in zip(outputs(model, *batches), expected, strict=True):
                models.assert_same_bits(ours, theirs)
            assert model.module.embeddings.channels() == {}
        dist.barrier()


def test_a_rank_has_its_answers_while_no_other_takes_part() -> None:
    run(3, answer_alone, deadline=120)


def outlive_the_others(rank: int) -> int:
    batches = [models.make_ids(models.EBC, seed, 4) for seed in range(20)]
    expected = outputs(make(lookup="exchange"), *batches)
    model = make()
    outputs(model, batches[0])
    pids: list[int] = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 ends it
    wait_until_gone(pids[2])
    try:
        for ours, theirs in zip(outputs(model, *batches), expected, strict=True):
            models.assert_same_bits(ours, theirs)
    finally:
        os.kill(pids[1], signal.SIGKILL)
    return len(batches)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} goes on")


def test_killed_and_stopped_ranks_cost_the_others_no_answer() -> None:
    outcomes = run_outcomes(3, outlive_the_others, deadline=120)
    assert outcomes[0].value == 20, str(outcomes[0])
    assert [outcome.exit_code for outcome in outcomes[1:]] == [-signal.SIGKILL] * 2


def refuse_bad_ids(rank: int) -> None:
    model, good = make(), models.make_ids(models.EBC, 1, 4)
    expected = outputs(model, good)[0]
    assert model.module.embeddings.refused_batches == 0
    if rank == 0:
        bad = models.make_ids(models.EBC, 1, 4)
        bad.values()[3] = 10**6
        with pytest.raises(ValueError, match="id 1000000 at position 3 of feature 'f0'"):
            outputs(model, bad)
    models.assert_same_bits(outputs(model, good)[0], expected)
    assert model.module.embeddings.refused_batches == int(rank == 0)
    replacing = make(bad_ids="row0")
    if rank == 0:
        zero = models.make_ids(models.EBC, 1, 4)
        zero.values()[3] = 0
        outputs(replacing, good)
        models.assert_same_bits(*outputs(replacing, bad, zero))
        assert replacing.module.embeddings.replaced_ids == 1
    else:
        outputs(replacing, good)


def test_a_batch_that_does_not_fit_costs_its_rank_one_answer() -> None:
    run(2, refuse_bad_ids)


def count_rows(rank: int, kind: models.Kind) -> None:
    model, ids = make(kind, sharding="row_wise"), models.make_ids(kind, 1, 4)
    module = model.module.embeddings
    assert module.rows_read == []
    outputs(model, ids, ids)
    unsharded: Any = kind.module()
    configs = getattr(unsharded, "embedding_bag_configs", None) or unsharded.embedding_configs
    owners: list[int] = []
    for table in configs():
        block = -(-table.num_embeddings // 2)
        for feature in table.feature_names:
            owners += (ids[feature].values() // block).tolist()
    assert module.rows_read == [2 * owners.count(0), 2 * owners.count(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_read_of_each_rank_are_counted(kind: models.Kind) -> None:
    run(2, count_rows, kind)


def write(how: str, model: DistributedModelParallel) -> None:
    if how == "load_state_dict":
        model.load_state_dict(model.state_dict())
        return
    shards = [shard for _, _, shard in models.local_shards(model).values()]
    if how == "add":
        shards[0].add_(1.0)
    elif how == "parameter":
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2.0)
    else:
        parameter = next(iter(model.parameters()))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=1.0).step()


def notice_writes(rank: int, how: str) -> None:
    for kind in (models.EC, models.EBC):
        model, ids = make(kind), models.make_ids(kind, 3, 4)
        expected = outputs(model, ids)[0]
        if rank == 0:
            write(how, model)
            with pytest.raises(ValueError, match="weights were written to after its tables became"):
                outputs(model, ids)
        dist.barrier()
        if rank == 1:  # its weights are as they were, and it reads the other rank's of before
            models.assert_same_bits(outputs(model, ids)[0], expected)


@pytest.mark.parametrize("how", ["load_state_dict", "add", "parameter", "optimizer"])
def test_written_weights_are_noticed_and_other_ranks_read_the_old_ones(how: str) -> None:
    run(2, notice_writes, how)


def keep_no_second_copy(rank: int) -> None:
    for kind in (models.EC, models.EBC):
        model = make(kind)
        before = {name: shard.clone() for name, (*_, shard) in models.local_shards(model).items()}
        lookups = model.module.embeddings._lookups
        old = {k.emb_module.weights_host.data_ptr() for each in lookups for k in each._emb_modules}
        outputs(model, models.make_ids(kind, 0, 2))
        for name, (*_, shard) in models.local_shards(model).items():
            assert torch.equal(shard, before[name]), name
        gc.collect()
        left = [
            each
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.untyped_storage().data_ptr() in old
            and each.nbytes
        ]
        assert not left
        # A view of before the move would have another one's memory.
        for each in lookups:
            for kernel in each._emb_modules:
                host = kernel.emb_module.weights_host.untyped_storage().data_ptr()
                for weights in kernel.split_embedding_weights():
                    assert not weights.nbytes or weights.untyped_storage().data_ptr() == host


def test_weights_move_with_every_tensor_that_shows_them() -> None:
    run(2, keep_no_second_copy)


def refuse(rank: int) -> None:
    ids = models.make_ids(models.EBC, 0, 2)
    model = make()
    if rank == 0:  # all ranks raise what one has to say
        model.module.embeddings._lookups[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="rank 0: a lookup does more than reading its tables"):
        outputs(model, ids)
    with pytest.raises(ValueError, match=r"'t0' is planned with .* data_parallel.*lookup=\"direct"):
        make(sharding="data_parallel")
    training = make()
    with pytest.raises(ValueError, match="autograd is on"):
        training(models.Batch(ids))
    outputs(training, ids)  # at the first forward; and after it:
    with pytest.raises(ValueError, match="autograd is on"):
        training(models.Batch(ids))
    outputs(training, ids)


def test_what_direct_reads_cannot_do_is_refused_on_all_ranks() -> None:
    run(2, refuse, deadline=120)


def choose(rank: int) -> None:
    ids = models.make_ids(models.EBC, 0, 2)
    names = ("reads", "trains", "hooked")
    reads, trains, hooked = (make(lookup="auto", name=name) for name in names)
    replicated = make(lookup="auto", sharding="data_parallel", name="replicated")
    if rank == 1:
        hooked.module.embeddings._lookups[0].register_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = outputs(reads, ids)[0]
        models.assert_same_bits(models.flatten(trains(models.Batch(ids))), expected)
        models.assert_same_bits(outputs(trains, ids)[0], expected)
        models.assert_same_bits(outputs(hooked, ids)[0], expected)
        outputs(replicated, ids)
    every = (reads, trains, hooked, replicated)
    chosen = [model.module.embeddings.reads_directly for model in every]
    assert chosen == [True, False, False, False]
    told = [str(each.message) for each in said if 'lookup="auto"' in str(each.message)]
    assert len(told) == (3 if rank == 0 else 0)
    for text, reason in zip(told, ("autograd", "rank 1: a lookup", "data_parallel"), strict=False):
        assert reason in text


def test_auto_reads_directly_where_all_ranks_can() -> None:
    run(2, choose)


def read_as_planned(rank: int) -> None:
    """TorchRec plans a tiny table on each rank, where a sharder lets it."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=16, name=name, feature_names=[name])
        for name, rows in {"user": 5000, "device": 50}.items()
    ]
    collection = EmbeddingBagCollection(tables=tables)
    lengths = torch.ones(8, dtype=torch.int32)
    ids = KeyedJaggedTensor(["user", "device"], torch.arange(8) + rank, lengths=lengths)
    expected = collection(ids).to_dict()
    model = DistributedModelParallel(
        collection,
        device=models.CPU,
        sharders=[BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct"))],
        init_data_parallel=False,
    )
    with torch.no_grad():
        found = model(ids).wait().to_dict()
    torch.testing.assert_close(found, expected)
    assert model.module.reads_directly


def test_torchrec_plans_tables_for_direct_reads() -> None:
    run(3, read_as_planned)


@pytest.mark.parametrize("config", [{"lookup": "fast"}, {"lookup": ""}])
def test_unknown_lookups_are_refused(config: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one of exchange, direct, auto"):
        BLSConfig(**config)  # type: ignore[arg-type]


def serve(rank: int) -> None:
    batches = [models.make_ids(models.EC, seed, 3) for seed in range(4)]
    model = make(models.EC, bound=2)
    expected = outputs(make(models.EC, "exchange"), *batches)
    bad = models.make_ids(models.EC, 0, 3)
    bad.values()[0] = -1
    pipeline = BoundedLagPipeline[models.Batch, Any](model)
    pipeline.prepare(models.Batch(batches[0]))
    calls: list[str] = []

    def load() -> Iterator[models.Batch | None]:
        yield models.Batch(batches[0])
        yield None
        yield models.Batch(bad)
        # Ranks have different numbers of batches.
        for ids in batches[1 : 2 + rank]:
            yield models.Batch(ids)

    source = load()
    models.assert_same_bits(models.flatten(pipeline.progress(source)), expected[0])
    assert pipeline.progress(source) is None
    pipeline.update(lambda: calls.append("updated"))
    with pytest.raises(BadBatchError, match=r"iteration 2.*id -1") as error:
        pipeline.progress(source)
    assert error.value.iteration == 2 and calls == ["updated"]
    for place in range(1, 2 + rank):
        models.assert_same_bits(models.flatten(pipeline.progress(source)), expected[place])
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert pipeline.drain() == []
    fail_in_the_model(pipeline, model, batches[0])
    assert pipeline.detach() is model


def fail_in_the_model(
    pipeline: BoundedLagPipeline[models.Batch, Any], model: DistributedModelParallel, ids: Any
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("none")

    handle = model.register_forward_hook(fail)
    with pytest.raises(PipelineError, match=r"model of iteration \d failed: ArithmeticError: none"):
        pipeline.progress(iter([models.Batch(ids)]))
    handle.remove()


def test_a_pipeline_answers_each_batch_at_once() -> None:
    run(3, serve)
