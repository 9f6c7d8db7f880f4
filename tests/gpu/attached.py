"""Processes that attach with a GPU, against lookups of the CPU.

    TRITON_INTERPRET=1 python -m tests.gpu.attached CHECK...

See sharded.py.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct import nodes
from tests.direct.nodes import DEADLINE, FLOAT, Node, NodeFailedError, Nodes, until
from tests.direct.row_versions import go_on
from tests.direct.test_keeper import KEEPER, keep, processes_of, publish
from tests.distributed import models
from tests.gpu.ids import BAD, on_gpu
from tests.gpu.sharded import GPU, IS_FAKE, gpu_here, make
from torchrec_bls import attach, version_of
from torchrec_bls.direct.gpu import device as devices
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.serving.served_model import ServedModel

QUANTIZED = "tests.quant.served"
REFRESHED = ["tests.direct.refreshed", "tests.quant.refreshed"]


@contextmanager
def keeper_and(served_by: str, *names: str) -> Iterator[Nodes]:
    """A keeper of version 1, and processes that have attached to it with a GPU."""
    with (
        tempfile.TemporaryDirectory() as folder,
        processes_of(Path(folder), served_by, KEEPER, *names, deadline=5 * DEADLINE) as processes,
    ):
        processes.call(KEEPER, keep, 1)
        processes.call_all(names, join, KEEPER)
        yield processes


def fake() -> Any:
    """The GPU of a process that has joined."""
    return devices.gpu_of(GPU)


def join(node: Node, source: str) -> None:
    gpu_here()
    node.model = node.served.bare_model()
    attach(node.model, node.path_of(source), deadline=DEADLINE, device=GPU)
    check(node)


def look_up(node: Node, batch: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        output: dict[str, torch.Tensor] = node.model(batch)
    assert all(each.device == fake().device for key, each in output.items() if key != "dense")
    return {name: tensor.cpu() for name, tensor in output.items()}


def check(node: Node, version: int | None = None) -> None:
    """Compares all batches with the version that each says it is of."""
    for number, batch in enumerate(node.batches):
        found = look_up(node, batch)
        seen = node.served.number_of(version_of(node.model))
        assert version in (None, seen)
        models.assert_same_bits(found, node.expected.of(seen, number))


def go_over(node: Node, version: int) -> None:
    """Looks batches up until a version serves, and checks it."""

    def serves() -> bool:
        look_up(node, node.batches[0])
        return version_of(node.model) == str(version)

    until(serves)
    check(node, version)


def leave(node: Node) -> None:
    """Frees the model, with all that was registered for it."""
    assert not IS_FAKE or fake().cuda.registered
    node.model = None
    gc.collect()
    if IS_FAKE:
        until(lambda: not fake().cuda.registered)


def follow(served_by: str) -> None:
    with keeper_and(served_by, "first", "second") as processes:
        processes.call(KEEPER, publish, 2)
        processes.call_all(["first", "second"], go_over, 2)
        processes.kill(KEEPER)
        processes.call("first", check, 2)
        processes.call("first", leave)
        processes.call("second", check, 2)


def attached_readers() -> None:
    for served_by in (FLOAT, QUANTIZED):
        follow(served_by)


def tell_late(node: Node) -> None:
    """Ids on the GPU have the bits of those on the host, and bad ones are told later."""
    gpu = fake()
    for number, batch in enumerate(node.batches):
        found = look_up(node, on_gpu(batch, gpu))
        models.assert_same_bits(found, node.expected.of(1, number))
    bad = node.batches[0]
    bad.values()[0] = BAD
    readers = [each for each in node.model.modules() if isinstance(each, AttachedCollection)]
    look_up(node, on_gpu(bad, gpu))
    for reader in readers:
        with pytest.raises(ValueError, match=rf"attached to .*version '1': id {BAD} of feature"):
            reader.wait_checked()
        reader.wait_checked()
        assert reader.input_check.refused_batches == 1
    look_up(node, on_gpu(bad, gpu))
    with pytest.raises(ValueError, match=rf"attached to .*id {BAD} of feature"):
        look_up(node, node.batches[1])


def refuse(node: Node) -> None:
    for device, message in (
        ("meta", "on the CPU or on a GPU of CUDA, not on 'meta'"),
        ("cuda:99", "this process sees|built without CUDA|no GPU here"),
    ):
        model = node.served.bare_model()
        with pytest.raises(ValueError, match=message):
            attach(model, node.path_of(KEEPER), device=torch.device(device))


def ids_of_attached_readers() -> None:
    with keeper_and(FLOAT, "reader") as processes:
        processes.call("reader", tell_late)
        processes.call("reader", refuse)


def registrations(node: Node) -> int:
    """Returns the number of registrations so far, once both sides are mapped."""
    reads = ServedModel.of(node.model).reads
    until(lambda: all(len(each.tables.windows.all) == 4 for each in reads))
    return fake().cuda.calls["register"] if IS_FAKE else 0


def stay_busy(node: Node, is_busy: bool) -> None:
    """Looks a batch up whose rows the GPU does not finish to read, and calls the model no more."""
    fake().cuda.is_busy = is_busy
    if is_busy:
        check(node)
        pins = ServedModel.of(node.model)._pins
        until(lambda: pins.held[0] == 0)


def refresh(served_by: str) -> None:
    with keeper_and(served_by, "reader") as processes:
        for number in range(2, 7):
            processes.call(KEEPER, go_on, number)
            processes.call("reader", go_over, number)
        # By now all tables got rows, and so have two copies.
        before = processes.call("reader", registrations)
        if IS_FAKE:
            processes.call("reader", stay_busy, True)
            pid = processes.call("reader", nodes.pid_of)
            processes.call(KEEPER, go_on, 7)
            # Nobody is in a forward, but kernels read the side of version 6.
            with pytest.raises(NodeFailedError, match=rf"PeerTimeoutError.*{pid}"):
                processes.call(KEEPER, go_on_soon, 8)
            processes.call("reader", stay_busy, False)
            processes.call(KEEPER, go_on, 8)
            processes.call("reader", go_over, 8)
        for number in range(9 if IS_FAKE else 7, 13):
            if number == 10:  # a whole one; each side was registered once until then
                assert processes.call("reader", registrations) == before
            processes.call(KEEPER, go_on, number)
            processes.call("reader", go_over, number)
        processes.call("reader", leave)


def go_on_soon(node: Node, number: int) -> None:
    go_on(node, number, deadline=1.0)


def refreshed_rows() -> None:
    for served_by in REFRESHED:
        refresh(served_by)


CHECKS = {
    check.__name__: check for check in (attached_readers, ids_of_attached_readers, refreshed_rows)
}

if __name__ == "__main__":
    from tests.gpu import attached

    make(attached.CHECKS)
