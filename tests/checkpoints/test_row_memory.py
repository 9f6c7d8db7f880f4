"""Rows of a step have memory of their own until nobody has them any more."""

import random
import threading

import torch

from torchrec_bls.checkpoints.row_memory import RowMemory


def test_the_next_rows_take_it_when_nobody_has_it() -> None:
    memory = RowMemory()
    rows = memory.rows((3, 4), torch.float32)
    begin = rows.data_ptr()
    del rows
    assert memory.rows((2, 4), torch.float16).data_ptr() == begin


def test_whoever_has_a_view_keeps_it() -> None:
    memory = RowMemory()
    rows = memory.rows((3, 4), torch.float32)
    begin = rows.data_ptr()
    views = [rows[1:], rows.view(torch.uint8), rows.numpy(), rows.detach().t()]
    del rows
    while views:
        assert memory.rows((3, 4), torch.float32).data_ptr() != begin
        views.pop()


def test_dtypes_and_shapes() -> None:
    memory = RowMemory()
    for shape in [(0, 4), (1,), (5, 0), (7, 3, 2), (1 << 12, 1 << 10)]:
        for dtype in [torch.bfloat16, torch.uint8, torch.float64]:
            rows = memory.rows(shape, dtype)
            assert (rows.shape, rows.dtype, rows.is_contiguous()) == (shape, dtype, True)


def test_no_two_have_the_same_memory() -> None:
    """Several threads, each with up to three tensors at once."""
    memory = RowMemory()
    failed = []

    def use(seed: int) -> None:
        generator = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for number in range(2000):
            rows = memory.rows((generator.randrange(1, 40), 8), torch.int64)
            value = seed * 10_000 + number
            rows.fill_(value)
            held.append((rows, value))
            while len(held) > generator.randrange(3):
                rows, value = held.pop(generator.randrange(len(held)))
                if not bool((rows == value).all()):
                    failed.append(value)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
