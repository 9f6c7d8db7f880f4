"""Memory files, seals, pages and limits as the kernel has them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import memory
from benchmarks.gpu.memory import HUGE, PRIVATE, READ, SHARED, WRITE


@pytest.mark.parametrize("huge", [True, False])
def test_a_file_is_filled_with_the_numbers_of_its_words(huge: bool) -> None:
    with memory.filled_file(2 * HUGE, huge) as fd:
        raw = os.pread(fd, 2 * HUGE, 0)
        words = torch.frombuffer(bytearray(raw), dtype=torch.int64)
        assert torch.equal(words, torch.arange(2 * HUGE // 8))


def test_parts_of_a_fill_go_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FILLED_AT_ONCE", 1000)
    with memory.mapped(-1, HUGE, READ | WRITE, PRIVATE | memory.ANONYMOUS) as mapping:
        mapping.fill()
        assert torch.equal(mapping.words, torch.arange(HUGE // 8))


@pytest.mark.parametrize("huge", [True, False])
def test_pages_of_a_mapping_are_counted(huge: bool) -> None:
    with (
        memory.memory_file(2 * HUGE) as fd,
        memory.mapped(fd, 2 * HUGE, READ | WRITE, SHARED) as mapping,
    ):
        assert mapping.address % HUGE == 0
        assert mapping.pages() == {"rss": 0, "pss": 0, "anonymous": 0, "huge": 0}
        memory.write(mapping, huge)
        whole = 2 * HUGE
        assert mapping.pages() == {
            "rss": whole,
            "pss": whole,
            "anonymous": 0,
            "huge": whole if huge else 0,
        }
        with memory.mapped(fd, whole, READ, SHARED) as second:
            second.populate()
            assert mapping.pages()["pss"] == second.pages()["pss"] == whole // 2


def test_small_pages_are_collapsed() -> None:
    with (
        memory.memory_file(HUGE) as fd,
        memory.mapped(fd, HUGE, READ | WRITE, SHARED) as mapping,
    ):
        memory.write(mapping, False)
        assert mapping.pages()["huge"] == 0
        mapping.advise_huge(True)
        assert mapping.collapse() == ""
        mapping.populate()
        assert mapping.pages()["huge"] == HUGE
        assert torch.equal(mapping.words, torch.arange(HUGE // 8))


def test_writes_to_a_private_mapping_copy_pages() -> None:
    with (
        memory.filled_file(HUGE, False) as fd,
        memory.mapped(fd, HUGE, READ | WRITE, PRIVATE) as mapping,
    ):
        mapping.words[:1024] = -1
        assert mapping.pages()["anonymous"] == 8192


def test_seals_are_those_of_tables() -> None:
    with memory.filled_file(HUGE, False) as fd:
        assert memory.seal(fd, memory.SIZE_SEALS | memory.WRITE_SEAL) == ""
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
        assert memory.seal(fd, memory.FUTURE_WRITE_SEAL) == "EPERM"
        with (
            pytest.raises(OSError, match="cannot map 2 MiB: Operation not permitted"),
            memory.mapped(fd, HUGE, READ | WRITE, SHARED),
        ):
            pass
        with memory.mapped(fd, HUGE, READ, SHARED) as mapping:
            assert mapping.protect(READ | WRITE) == "EACCES"
            assert int(mapping.words[-1]) == HUGE // 8 - 1


def test_a_guarded_mapping_stays_and_no_later_one_writes() -> None:
    with (
        memory.filled_file(HUGE, False) as fd,
        memory.mapped(fd, HUGE, READ | WRITE, SHARED) as mapping,
    ):
        assert mapping.protect(READ) == ""
        assert memory.seal(fd, memory.WRITE_SEAL) == "EBUSY"
        assert memory.seal(fd, memory.FUTURE_WRITE_SEAL) == ""
        with pytest.raises(OSError) as raised, memory.mapped(fd, HUGE, READ | WRITE, SHARED):
            pass
        assert raised.value.errno == errno.EPERM
        assert int(mapping.words[5]) == 5


def test_nothing_stays_mapped_or_open() -> None:
    def state() -> tuple[int, set[str]]:
        maps = Path("/proc/self/maps").read_text().count(memory.NAME)
        return maps, {each.name for each in Path("/proc/self/fd").iterdir()}

    before = state()
    with (
        pytest.raises(ZeroDivisionError),
        memory.filled_file(HUGE, True) as fd,
        memory.mapped(fd, HUGE, READ, SHARED),
    ):
        assert state()[0] == before[0] + 1
        raise ZeroDivisionError
    assert state() == before


def test_what_is_left_is_less_than_the_host_has() -> None:
    host = memory.host_kib()
    assert 0 < memory.memory_left() <= host["MemTotal"] << 10
    own = memory.memory_kib()
    assert own == {} or own["Pss"] > 1000
    assert memory.memory_kib(2**30) == {}
    assert mmap.PAGESIZE == 4096
