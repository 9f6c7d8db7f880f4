"""Files that change, go, or are closed while they are read."""

import os
import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoints.files import WRITERS
from torchrec_bls.checkpoints import Checkpoint, open_checkpoint, why_incomplete
from torchrec_bls.checkpoints import files as files_module

TABLE = torch.arange(4000.0).reshape(1000, 4)


def written(kind: str, folder: Path) -> tuple[Path, Path]:
    """Returns the path of a checkpoint, and its file with the values."""
    path = WRITERS[kind](folder, {"t": TABLE})
    return path, path / "__0_0.distcp" if path.is_dir() else path


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_file_that_is_cut_off_while_it_is_read(kind: str, tmp_path: Path) -> None:
    path, file = written(kind, tmp_path)
    with open_checkpoint(path) as checkpoint:
        rows = checkpoint["t"]
        assert torch.equal(rows.read(0, 10), TABLE[:10])
        os.truncate(file, 8000)
        with pytest.raises(ValueError, match="ends at byte 8000, but rows 900 to 1000 of 't'"):
            rows.read(900, 1000)
        # Its first rows are there, but nobody knows of which checkpoint.
        with pytest.raises(ValueError, match="has changed since the checkpoint was opened"):
            rows.read(0, 10)


def test_a_file_that_is_written_to_while_it_is_read(kind: str, tmp_path: Path) -> None:
    path, file = written(kind, tmp_path)
    with open_checkpoint(path) as checkpoint:
        checkpoint["t"].read(0, 10)
        found = file.stat()
        with file.open("r+b") as opened:
            opened.write(opened.read(1))
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))
        with pytest.raises(ValueError, match="has changed since the checkpoint was opened"):
            checkpoint["t"].read(10, 20)


def test_a_file_that_is_replaced_before_it_is_read(tmp_path: Path) -> None:
    path, file = written("distributed", tmp_path)
    with open_checkpoint(path) as checkpoint:
        found, data = file.stat(), file.read_bytes()
        file.rename(tmp_path / "old")
        file.write_bytes(data)
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        with pytest.raises(ValueError, match="has changed since the checkpoint was opened"):
            checkpoint["t"].read(0, 10)


def test_a_checkpoint_that_is_deleted_while_it_is_read(kind: str, tmp_path: Path) -> None:
    path, file = written(kind, tmp_path)
    with open_checkpoint(path) as checkpoint:
        checkpoint["t"].read(0, 10)
        file.unlink()
        assert torch.equal(checkpoint["t"].whole(), TABLE)  # an open file stays


def test_a_file_that_is_deleted_before_it_is_read(tmp_path: Path) -> None:
    path, file = written("distributed", tmp_path)
    with open_checkpoint(path) as checkpoint:
        file.unlink()
        with pytest.raises(ValueError, match=r"__0_0.distcp can't be read \(No such file"):
            checkpoint["t"].read(0, 10)


def test_a_closed_checkpoint(kind: str, tmp_path: Path) -> None:
    path, _ = written(kind, tmp_path)
    with open_checkpoint(path) as checkpoint:
        rows = checkpoint["t"]
        rows.read(0, 1)
    with pytest.raises(ValueError, match="its checkpoint is closed"):
        rows.read(0, 1)
    checkpoint.close()


def test_a_read_that_another_thread_closes_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written("safetensors", tmp_path)
    checkpoint = open_checkpoint(path)
    read, preadv = checkpoint["t"], os.preadv

    def closing(descriptor: int, buffers: list[memoryview], at: int) -> int:
        closer = threading.Thread(target=checkpoint.close)
        closer.start()
        closer.join()
        # Another file would get the number of a descriptor that is closed.
        with (tmp_path / "other").open("wb+", buffering=0) as other:
            other.write(bytes(1 << 20))
            assert other.fileno() != descriptor
            return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", closing)
    assert torch.equal(read.read(3, 9), TABLE[3:9])


def test_no_more_files_are_open_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_MOST_OPEN", 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = files_module.Files(tmp_path)
    for turn in range(2):
        for number in range(5):
            path = tmp_path / str(number)
            if not turn:
                path.write_bytes(bytes([number] * 9))
                files.add(path)
            assert files.read(path, 2, 3, "it") == bytes([number] * 3)
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_short_read_is_not_the_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(kind, tmp_path)
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:100]], at)
    )
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["t"].read(5, 200), TABLE[5:200])


def test_a_growing_checkpoint_is_incomplete_until_its_last_byte(kind: str, tmp_path: Path) -> None:
    path, file = written(kind, tmp_path)
    assert why_incomplete(path) == ""
    data = file.read_bytes()
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        assert str(file) in why_incomplete(path), size
    file.write_bytes(data)
    assert why_incomplete(path) == ""
    with open_checkpoint(path) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert torch.equal(checkpoint["t"].whole(), TABLE)
