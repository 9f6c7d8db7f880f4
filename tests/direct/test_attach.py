"""Processes that come later: readers, and those that take the place of ranks that are gone."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.direct import nodes, served
from tests.direct.nodes import Node, started
from tests.distributed import models
from tests.processes import run
from torchrec_bls import BLSConfig, attach, bounded_lag_modules, offer, publish
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.serving.publisher import Publisher

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
SHARDINGS = ("table_wise", "row_wise", "column_wise")


def batches_of(kind: models.Kind) -> list[Any]:
    return [models.make_ids(kind, seed=i, samples=5) for i in range(3)]


def serve_kind(node: Node, name: str, sharding: str) -> list[dict[str, torch.Tensor]]:
    """Offers a module that reads directly; returns what TorchRec's own module gives."""
    kind = KINDS[name]
    theirs = models.shard(kind, sharding, kind.torchrec_sharder())
    node.model = models.shard(kind, sharding, kind.bls_sharder(BLSConfig(lookup="direct")))
    with torch.no_grad():
        models.arrived(node.model(models.Batch(batches_of(kind)[0])))
        node.offers.append(offer(node.model, node.path_of(f"{name}.{sharding}.{node.rank}")))
        return [models.flatten(theirs(models.Batch(ids))) for ids in batches_of(kind)]


def read_kind(node: Node, name: str, sharding: str, inference: bool) -> list[Any]:
    kind = KINDS[name]
    model = models.SparseOnly(kind.module())
    attach(model, node.path_of(f"{name}.{sharding}.1"))
    with torch.inference_mode(inference), torch.no_grad():
        return [models.flatten(model(models.Batch(ids))) for ids in batches_of(kind)]


def test_outputs_have_the_bits_of_torchrecs_own_sharded_modules(tmp_path: Path) -> None:
    """Means, weights, and sums of the ranks' parts of a bag are rounded as TorchRec does."""
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        for name in KINDS:
            for sharding in SHARDINGS:
                expected = processes.call_all([0, 1], serve_kind, name, sharding)[0]
                for inference in (False, True):
                    read = processes.call("reader", read_kind, name, sharding, inference)
                    for ours, theirs in zip(read, expected, strict=True):
                        models.assert_same_bits(ours, theirs)


def test_a_reader_outlives_all_ranks(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        seen = processes.call("reader", nodes.state)
        assert (seen.rank, seen.serial, seen.owners_gone) == (None, 1, ())
        assert len(seen.rows_read) == 2 and min(seen.rows_read) > 0
        for rank in (0, 1):
            processes.begin("reader", nodes.check_many, 400, f"begun {rank}")
            nodes.until((tmp_path / f"begun {rank}").exists)
            processes.kill(rank)
            assert processes.end("reader") == 1
        assert processes.call("reader", nodes.state).owners_gone == (0, 1)


def publish_alone(node: Node) -> None:
    with pytest.raises(ValueError, match="reads the tables of others and publishes none"):
        publish(node.model, served.weights_of(2), version="2")
    with pytest.raises(ValueError, match="rank 1 lives, as process"):
        publish(node.model, served.weights_of(2), version="2", owner=1)


def test_a_reader_follows_versions_in_tables_and_dense_weights(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 1)
        processes.call("reader", publish_alone)
        for version in (2, 3):
            processes.call(0, nodes.publish_all, version)
            processes.call("reader", nodes.check, version - 1)
            processes.call(1, nodes.publish_all, version)
            for name in (0, 1, "reader"):
                processes.call(name, nodes.go_over, version)


def publish_live(node: Node, version: int) -> None:
    """Writes a version to the live weights and publishes them."""
    new = served.weights_of(version)
    with torch.no_grad():
        for name, (rows, columns, shard) in models.local_shards(node.model).items():
            shard.copy_(new[name.partition(" ")[0]][rows, columns])
        for name, replica in models.replicas(node.model).items():
            replica.copy_(new[name])
        publish(node.model, version=str(version), deadline=nodes.DEADLINE)


def test_live_weights_that_are_published_come_with_their_dense_weights(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 1)
        processes.call_all([0, 1], publish_live, 2)
        processes.call("reader", nodes.go_over, 2)


def write_in_vain(node: Node) -> None:
    served.write_in_place(node.model, 9)
    with pytest.raises(ValueError, match="written to"):
        nodes.check(node)


def test_what_was_written_and_not_published_is_not_handed_over(tmp_path: Path) -> None:
    """Tables and dense weights of one version are, though the process itself serves none."""
    with started(tmp_path, 1) as processes:
        for version in (1, 2):
            processes.call(0, write_in_vain)
            name = f"reader of {version}"
            processes.start(name)
            processes.call(name, nodes.join, 0)
            processes.call(name, nodes.check, version)
            processes.call(0, nodes.publish_all, version + 1)
            nodes.until(lambda version=version: processes.call(0, serves, version + 1))


def serves(node: Node, version: int) -> bool:
    with suppress(ValueError):  # what was written is still to be replaced
        return nodes.check(node) == version
    return False


def owners_gone(node: Node) -> list[list[int]]:
    return [module.owners_gone for module in bounded_lag_modules(node.model).values()]


def publish_nothing_loaded(node: Node) -> None:
    with pytest.raises(ValueError, match="were not loaded in this process"):
        publish(node.model, version="2")


def test_a_rank_returns_and_publishes_again(tmp_path: Path) -> None:
    with started(tmp_path, 3) as processes:
        processes.kill(1)
        assert processes.call(0, owners_gone) == [[1], [1]]
        assert processes.call(0, nodes.state).owners_gone == (1,)
        processes.start("returned")
        processes.call("returned", nodes.join, 0, 1, "returned")
        assert processes.call(0, owners_gone) == [[], []]
        assert processes.call("returned", nodes.state).rank == 1
        processes.call("returned", publish_nothing_loaded)
        for name in (0, "returned", 2):
            processes.call(name, nodes.publish_all, 2)
        for name in (0, "returned", 2):
            processes.call(name, nodes.go_over, 2)


def test_all_ranks_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        source: object = 1
        for rank in (0, 1):
            processes.kill(rank)
            name = f"returned {rank}"
            processes.start(name)
            processes.call(name, nodes.join, source, rank, name)
            source = name
        names = ["returned 0", "returned 1"]
        for version in (2, 3):
            for name in names:
                processes.call(name, nodes.publish_all, version)
            for name in names:
                processes.call(name, nodes.go_over, version)
        assert processes.call("returned 1", nodes.state).owners_gone == ()


def take_what_is_taken(node: Node, source: object, owner: int) -> None:
    model = nodes.bare_model()
    names = [type(module).__name__ for module in model.modules()]
    with pytest.raises(ValueError, match=f"rank {owner} lives, as process"):
        attach(model, node.path_of(source), owner=owner)
    with pytest.raises(ValueError, match="owner is 2, but must be a rank of 2"):
        attach(model, node.path_of(source), owner=2)
    assert [type(module).__name__ for module in model.modules()] == names


def test_one_process_publishes_for_a_rank(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        for name in ("first", "second"):
            processes.start(name)
        processes.call("second", take_what_is_taken, 0, 1)  # the rank itself
        processes.kill(1)
        processes.call("first", nodes.join, 0, 1)
        processes.call("second", take_what_is_taken, 0, 1)
        processes.kill("first")
        processes.call("second", nodes.join, 0, 1)
        processes.call("second", nodes.publish_all, 2)
        processes.call(0, nodes.publish_all, 2)
        processes.call("second", nodes.go_over, 2)


def test_a_reader_publishes_for_ranks_that_are_gone(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        processes.kill(0)
        processes.kill(1)
        for owner in (0, 1):
            processes.call("reader", nodes.publish_all, 2, owner)
        processes.call("reader", nodes.go_over, 2)
        assert processes.call("reader", nodes.state).owners_gone == (0, 1)


def test_who_is_behind_takes_the_newest_version(tmp_path: Path) -> None:
    """An offer of a version that is long replaced, and a reader that was stopped."""
    with started(tmp_path, 2) as processes:
        for name in ("stopped", "late"):
            processes.start(name)
        processes.call("stopped", nodes.join, 0)
        pid = processes.call("stopped", nodes.pid_of)
        os.kill(pid, signal.SIGSTOP)
        for version in (2, 3, 4):
            processes.call(0, nodes.publish_all, version)
            processes.call(1, nodes.publish_all, version)
        # Rank 0 has had no batch since, and offers version 1.
        assert processes.call(0, nodes.state).version == FIRST_VERSION
        processes.call("late", nodes.join, 0)
        os.kill(pid, signal.SIGCONT)
        for name in ("late", "stopped"):
            processes.call(name, nodes.go_over, 4)
        assert processes.call(0, nodes.check, 4) == 4


def attach_slowly(rank: int, folder: str) -> None:
    model, batches = served.sharded(), served.batches_of(rank)
    expected = served.Expected(batches)
    served.check(model, batches, expected, 0)
    joined = nodes.bare_model()
    make = Publisher.__init__

    def make_slowly(publisher: Publisher, *args: Any, **kwargs: Any) -> None:
        """The thread that maps is quicker than the one that has made it."""
        make(publisher, *args, **kwargs)
        nodes.until(lambda: publisher.follower.newest[0].serial == 2)

    with offer(model, f"{folder}/socket") as offered:
        publish(model, served.weights_of(2), version="2")
        # The model has had no batch since, and so the first version is handed over.
        Publisher.__init__ = make_slowly  # type: ignore[method-assign]
        attach(joined, offered.path, deadline=nodes.DEADLINE)
        Publisher.__init__ = make  # type: ignore[method-assign]
    assert served.check(joined, batches, expected, 0) == 2


def test_a_version_that_is_mapped_while_a_reader_attaches_is_taken(tmp_path: Path) -> None:
    run(1, attach_slowly, str(tmp_path))


def with_a_bad_id(batch: Any) -> Any:
    values = batch.values().clone()
    values[0] = 10_000
    return KeyedJaggedTensor(batch.keys(), values, None, batch.lengths())


def read_what_is_bad(node: Node) -> None:
    with pytest.raises(ValueError, match=r"bags, attached to .*: autograd is on"):
        node.model(node.batches[0])
    with torch.no_grad():
        for bad in (with_a_bad_id(node.batches[0]), None):
            with pytest.raises(ValueError, match="bags, attached to "):
                node.model(bad)
    nodes.check(node, 1)


def serve_leniently(node: Node) -> None:
    node.model = served.sharded(BLSConfig(lookup="direct", bad_ids="row0"))
    nodes.check(node, 1)
    node.offers.append(offer(node.model, node.path_of(f"lenient {node.rank}")))


def read_leniently(node: Node) -> int:
    nodes.join(node, "lenient 0")
    with torch.no_grad(), pytest.warns(UserWarning, match="looked up as row 0"):
        node.model(with_a_bad_id(node.batches[0]))
    replaced: int = node.model.bags.replaced_ids
    return replaced


def test_bad_batches_are_treated_as_by_the_ranks(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        processes.call("reader", read_what_is_bad)
        processes.call_all([0, 1], serve_leniently)
        assert processes.call("reader", read_leniently) == 1
