"""New weights while batches are served: all of a version or nothing of it."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.direct import served
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.processes import run
from torchrec_bls import BLSConfig, publish, version_of
from torchrec_bls.errors import PeerTimeoutError

DEADLINE = 30.0


def publish_whole_tables(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    assert version_of(model) == ""
    assert check(model, batches, expected, 0) == 1
    for version in (2, 3):
        dist.barrier()
        if rank == 0:
            first = publish(model, weights_of(version), version=str(version))
            # One owner of three has announced it.
            assert not first.serves
            for i in range(8):
                assert check(model, batches, expected, i) == version - 1
            with pytest.raises(PeerTimeoutError, match=r"ranks \[1, 2\] have not published it"):
                first.wait(0.01)
        dist.barrier()
        own = first if rank == 0 else publish(model, weights_of(version), version=str(version))
        assert own.version == str(version)
        own.wait(DEADLINE)
        assert own.serves
        for i in range(8):
            assert check(model, batches, expected, i) == version
        check_live(model, version)


def check_live(model: Any, version: int) -> None:
    """The model's own parameters show the new version."""
    weights = weights_of(version)
    for name, tensor in model.state_dict().items():
        if not hasattr(tensor, "local_shards"):
            assert torch.equal(tensor, weights[name]), name
            continue
        for shard in tensor.local_shards():
            (row, column), (rows, columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            part = weights[name][row : row + rows, column : column + columns]
            assert torch.equal(shard.tensor, part), name


def test_all_change_together_once_all_owners_have_published() -> None:
    run(3, publish_whole_tables)


def publish_live_weights(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    for version in (2, 3):
        served.write_in_place(model, version)
        with torch.no_grad():
            if rank == 0:
                with pytest.raises(ValueError, match="Publish them"):
                    model(batches[0])
            publish(model, version=str(version)).wait(DEADLINE)
        assert check(model, batches, expected, 1) == version
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def test_what_was_written_to_the_live_weights_is_published() -> None:
    run(2, publish_live_weights)


def give_writes_up(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 2
    dist.barrier()
    if rank == 0:
        served.write_in_place(model, 3)  # and gives them up for what is served
        assert publish(model, weights_of(2), version="2").was_announced
        assert check(model, batches, expected, 1) == 2
        check_live(model, 2)
        publish(model, weights_of(4), version="4")
        served.write_in_place(model, 3)  # and gives them up for what waits for the others
        assert publish(model, weights_of(4), version="4").was_announced
        with torch.no_grad(), pytest.raises(ValueError, match="written to and published"):
            model(batches[0])
    dist.barrier()
    publish(model, weights_of(4), version="4").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 4
    check_live(model, 4)
    served.write_in_place(model, 3)
    publish(model, weights_of(4), version="4")
    served.write_in_place(model, 5)  # what is served is shown again, and no batch has to come first
    publish(model, version="5").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 5
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def test_a_state_dict_of_an_announced_version_replaces_writes() -> None:
    run(2, give_writes_up)


def publish_shards_of_another_model(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    other = served.sharded(BLSConfig())
    other.load_state_dict(other.state_dict())  # of this plan
    with torch.no_grad():
        for name, (rows, columns, shard) in served.models.local_shards(other).items():
            shard.copy_(weights_of(2)[name.partition(" ")[0]][rows, columns])
        for name, tensor in served.models.replicas(other).items():
            tensor.copy_(weights_of(2)[name])
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, other.state_dict(), version="2").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 2


def test_sharded_tensors_of_the_same_plan_are_published() -> None:
    run(2, publish_shards_of_another_model)


def publish_what_does_not_fit(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    with pytest.raises(ValueError, match="call the model once"):
        publish(model, weights_of(2), version="2")
    check(model, batches, expected, 0)
    table, whole = "bags.embedding_bags.t0.weight", weights_of(2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({name: w for name, w in whole.items() if name != table}, f"no '{table}'"),
        ({name: w for name, w in whole.items() if name != "dense.bias"}, "no 'dense.bias'"),
        (whole | {table: whole[table][1:]}, r"has shape \[40, 8\], but the model's has \[41, 8\]"),
        (whole | {table: whole[table].double()}, "is of torch.float64"),
        (whole | {table: None}, "is a NoneType"),
        (whole | {"dense.bias": torch.zeros(2)}, r"'dense.bias' has shape \[2\]"),
    ]
    for weights, text in wrong:
        # Rank 1 has published already: it waits for this one.
        if rank == 0:
            with pytest.raises(ValueError, match=text):
                publish(model, weights, version="2")
    if rank == 1:
        publish(model, whole, version="2")
    dist.barrier()
    for i in range(4):
        assert check(model, batches, expected, i) == 1
    dist.barrier()
    if rank == 0:
        publish(model, whole, version="2")
    with pytest.raises(ValueError, match=f"rank {1 - rank} lives, as process"):
        publish(model, whole, version="2", owner=1 - rank)
    served_by_all = publish(model, weights_of(3), version="3", owner=rank, deadline=DEADLINE)
    assert served_by_all.version == "3"
    served_by_all.wait(DEADLINE)
    assert check(model, batches, expected, 0) == 3


def test_what_does_not_fit_is_refused_and_leaves_the_old_version() -> None:
    run(2, publish_what_does_not_fit)


def publish_from_a_thread(rank: int, versions: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    for version in range(1, versions + 1):  # before: they take long
        expected.of(version, 0)
    weights = [weights_of(version) for version in range(2, versions + 1)]
    failures: list[BaseException] = []

    def publish_all() -> None:
        try:
            for number, new in enumerate(weights, 2):
                publish(model, new, version=str(number), deadline=DEADLINE).wait(DEADLINE)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=publish_all)
    thread.start()
    seen, number = [1], 0
    while thread.is_alive() or seen[-1] < versions:
        seen.append(check(model, batches, expected, number))
        number += 1
        assert not failures, failures
    thread.join()
    assert seen == sorted(seen) and seen[-1] == versions
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def test_no_batch_sees_two_versions() -> None:
    run(3, publish_from_a_thread, 12)
