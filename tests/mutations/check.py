"""Mutates a file again and again, and reads it each time."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from random import Random

from tests.mutations.files import KINDS, REFUSALS
from tests.mutations.mutate import mutated


def check(name: str, times: int, seed: int, folder: Path) -> Counter[str]:
    """Returns how often the reader accepted or refused a mutated file.

    Raises:
        AssertionError: the reader raised something else than it promises; the text has the seed.
    """
    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    path = kind.write(folder)
    good, counts = path.read_bytes(), Counter[str]()
    kind.read(path)
    for number in range(seed, seed + times):
        path.write_bytes(mutated(good, path.suffix == ".gz", Random(f"{name} {number}")))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind.read(path)
        except REFUSALS as refused:
            assert str(refused), f"{name}, seed {number}: no reason"
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(
                f"{name}, seed {number}: {type(error).__name__}: {error}"
            ) from error
        else:
            counts["accepted"] += 1
    path.write_bytes(good)
    return counts
