"""Which processes live, and which of them holds a file."""

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct.nodes import until
from tests.direct.test_last_defence import no_descriptors
from torchrec_bls import _native
from torchrec_bls.direct import file_holders
from torchrec_bls.direct.file_holders import holders_of, holds_all
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.errors import ProtocolError


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes all searches among the processes."""
    found: list[str] = []
    listdir = os.listdir

    def noting(path: Any = ".") -> list[str]:
        if str(path) == "/proc":
            found.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", noting)
    yield found


def memory_in_flight() -> tuple[socket.socket, int, int]:
    """Returns a socket to which a file was sent that no process holds, its device and inode."""
    made = os.memfd_create("test")
    found = os.fstat(made)
    sending, receiving = socket.socketpair()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made]))]
    sending.sendmsg([b"d"], rights)
    os.close(made)
    sending.close()
    return receiving, found.st_dev, found.st_ino


def test_a_search_in_vain_is_not_repeated_at_once(
    searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_holders, "_REST", 1e9)  # whatever the machine is busy with
    monkeypatch.setattr(file_holders, "_in_vain", {})
    receiving, device, inode = memory_in_flight()
    with receiving:
        for _ in range(20):
            assert not holders_of([(device, inode)])
        assert len(searches) == 1
        # Another file is looked for at once.
        assert not holders_of([(device, inode + 1)])
        assert len(searches) == 2


def test_a_search_in_vain_is_repeated_after_a_rest() -> None:
    receiving, device, inode = memory_in_flight()
    with receiving:
        assert not holders_of([(device, inode)])
        _, [made], _, _ = socket.recv_fds(receiving, 1, 1)
        until(lambda: bool(holders_of([(device, inode)])))
        assert holders_of([(device, inode)]) == {(device, inode): (os.getpid(), made)}
        os.close(made)


def test_who_cannot_look_says_so() -> None:
    receiving, device, inode = memory_in_flight()
    with receiving, no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        holders_of([(device, inode)])
    receiving.close()
    assert not holders_of([(device, inode)])  # it has looked this time


def test_a_process_holds_all_files_or_not(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.touch()
    files = [(path.stat().st_dev, path.stat().st_ino) for path in paths]
    with paths[0].open():
        assert holds_all(os.getpid(), files[:1])
        assert not holds_all(os.getpid(), files)
        with paths[1].open():
            assert holds_all(os.getpid(), files)
    assert not holds_all(0, files)  # there is no such process


def test_the_file_of_another_label_is_not_looked_for_elsewhere(searches: list[str]) -> None:
    layout = TableLayout("t", 4, 4, "FP32", (Shard(0, 0, 4, 0, 4),))
    digest = digest_of([layout])
    page = _native.ControlPage.create(1, digest)
    places = {("t", layout.shards[0]): 0}
    tables = FloatTables(page, digest, {"t": layout}, [64], False, places, torch.float32)
    segment = _native.TableSegment.create((0, "1", tables.digest), [], 8192, False)
    tables.page.record(0, 2, "2", segment.address)
    with pytest.raises(ProtocolError, match="version '1', not of rank 0 and version '2'"):
        tables.open(0, 2, "2")
    assert searches == []
