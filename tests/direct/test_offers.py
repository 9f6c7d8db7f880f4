"""What an offer keeps alive, whom it counts, what it says of a reader, and whom it waits for."""

import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection

from tests.direct import nodes, served
from tests.direct.nodes import Node, started, until
from tests.direct.served import Expected, batches_of, check
from tests.direct.test_last_defence import no_descriptors
from tests.processes import run
from torchrec_bls import attach, offer, serving_state
from torchrec_bls.direct.offers.listening import listen
from torchrec_bls.errors import RendezvousError

DEADLINE = 30.0


def offer_without_closing(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    with offer(model, f"{folder}/source") as source:
        path = f"{folder}/joined"
        before = _held()
        for _ in range(3):
            joined = nodes.bare_model()
            attach(joined, source.path, deadline=DEADLINE)
            unclosed = offer(joined, path)
            check(joined, batches, expected, 0)
            del joined
            gc.collect()
            until(lambda: not Path(path).exists())
            unclosed.close()
            del unclosed
            gc.collect()
        until(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)))
        # One process, however often it has attached.
        assert serving_state(model).readers == (os.getpid(),)


def _held() -> tuple[int, int]:
    """Returns the numbers of threads and of descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_an_offer_ends_with_its_model(tmp_path: Path) -> None:
    run(1, offer_without_closing, str(tmp_path))


def reordered() -> nn.Module:
    model = nodes.bare_model()
    configs = model.bags.embedding_bag_configs()  # type: ignore[operator, union-attr]
    model.bags = EmbeddingBagCollection(tables=configs[::-1], device=torch.device("meta"))
    return model


def offer_in_another_order(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    first, second = reordered(), nodes.bare_model()
    with offer(model, f"{folder}/source") as source:
        attach(first, source.path, deadline=DEADLINE)
    with offer(first, f"{folder}/reordered") as source:
        attach(second, source.path, deadline=DEADLINE)
    for joined in (first, second):
        for number in range(len(batches)):
            check(joined, batches, expected, number)


def test_a_reader_with_another_order_of_tables_offers_them_as_they_are(tmp_path: Path) -> None:
    run(1, offer_in_another_order, str(tmp_path))


def test_who_locks_the_folder_blocks_nobody(tmp_path: Path) -> None:
    """Another user may lock whatever it may read."""
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        listen(str(tmp_path / "socket")).close()
    finally:
        os.close(folder)


def test_a_lock_of_others_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / f".torchrec_bls.{os.geteuid()}.lock"
    listen(str(tmp_path / "socket")).close()
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.chmod(0o644)
    with pytest.raises(ValueError, match="open to others, who could keep it locked: remove it"):
        listen(str(tmp_path / "socket"))
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="cannot listen at"):
        listen(str(tmp_path / "socket"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_lack_of_descriptors_is_a_documented_error(tmp_path: Path) -> None:
    with no_descriptors():
        with pytest.raises(ValueError, match=r"cannot listen at .* Too many open files"):
            listen(str(tmp_path / "socket"))
        with pytest.raises(RendezvousError, match=r"Too many open files. Raise .*\(ulimit -n\)"):
            attach(nodes.bare_model(), tmp_path / "socket")
    listen(str(tmp_path / "socket")).close()


def fail_late(node: Node, source: object, owner: int) -> None:
    """A module that can't be served is seen last."""
    model: Any = nodes.bare_model()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no hooks")

    model.register_forward_hook = fail
    modules, weights = list(model.modules()), model.dense.weight.clone()
    hooks = dict(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="no hooks"):
        attach(model, node.path_of(source), owner=owner, deadline=DEADLINE)
    assert list(model.modules()) == modules
    assert torch.equal(model.dense.weight, weights)
    assert dict(model._forward_pre_hooks) == hooks


def test_attach_that_fails_late_leaves_place_and_model(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        for name in ("failed", "returned"):
            processes.start(name)
        processes.kill(1)
        processes.call("failed", fail_late, 0, 1)
        assert processes.call(0, nodes.state).owners_gone == (1,)
        processes.call("returned", nodes.join, 0, 1)
        assert processes.call(0, nodes.state).owners_gone == ()
