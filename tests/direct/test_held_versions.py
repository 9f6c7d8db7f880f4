"""A version is held as long as anything refers to memory of it."""

import gc
import random

import torch

from torchrec_bls import _native
from torchrec_bls.direct.held_versions import HeldVersions

LAYOUT = bytes(32)


class Mapping:
    """Stands for memory that is mapped."""

    def __init__(self) -> None:
        self.kept: object = None


def test_the_oldest_is_that_of_what_is_left() -> None:
    """Compared with a list of what is left, over many additions and removals."""
    generator = random.Random(0)
    held, left = HeldVersions(), list[tuple[int, Mapping]]()
    for serial in range(1, 400):
        made = [Mapping() for _ in range(generator.randrange(1, 4))]
        held.add(serial, made)
        left += [(serial, each) for each in made]
        del made
        generator.shuffle(left)
        del left[generator.randrange(1, 8) :]
        expected = min((serial for serial, _ in left), default=1000)
        assert held.oldest(1000) == expected
    left.clear()
    assert held.oldest(1000) == 1000


def test_a_mapping_that_a_later_version_shares_counts_as_one_of_that() -> None:
    held, shared, own = HeldVersions(), Mapping(), Mapping()
    held.add(1, [shared, own])
    held.add(2, [shared])
    assert held.oldest(2) == 1
    del own
    assert held.oldest(9) == 2
    del shared
    assert held.oldest(9) == 9


def test_what_refers_to_itself_is_held_until_it_is_collected() -> None:
    held, mapping = HeldVersions(), Mapping()
    mapping.kept = mapping
    held.add(1, [mapping])
    gc.disable()
    try:
        del mapping
        assert held.oldest(2) == 1
    finally:
        gc.enable()
    gc.collect()
    assert held.oldest(2) == 2


def test_a_tensor_holds_the_pages_that_it_shows() -> None:
    held = HeldVersions()
    ones = torch.ones(1024)
    part = (ones, _native.FIRST_TABLE_OFFSET)
    segment = _native.TableSegment.create(
        (0, "1", LAYOUT), [part], _native.FIRST_TABLE_OFFSET + ones.nbytes, False
    )
    pages = _native.PrivatePages(segment)
    window = _native.TableWindow([(segment, 0, 4096)])
    held.add(1, [segment])
    held.add(2, [pages])
    held.add(3, [window])
    first_table = _native.FIRST_TABLE_OFFSET
    shown = torch.frombuffer(pages, dtype=torch.uint8)[first_table:].view(ones.dtype)
    first = torch.frombuffer(window, dtype=torch.uint8)[:1]
    del pages, segment, window
    assert held.oldest(9) == 2
    assert torch.equal(shown[:1024], ones)
    row = shown[3:4].detach()
    del shown
    assert held.oldest(9) == 2
    del row
    assert held.oldest(9) == 3
    del first
    assert held.oldest(9) == 9
