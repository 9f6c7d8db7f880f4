"""What kernels are told of tables, and what they tell of ids. Users of CPUs need nothing of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.paths import ROOT
from torchrec_bls.direct.gpu.report import BadId, first_bad_id, new_report
from torchrec_bls.direct.gpu.strips import FIELDS, Strip, Strips

CPU = torch.device("cpu")
STRIP = Strip(1, 2, 8, 32, 10, 6, True, [4096, 8192])


def test_facts_are_those_of_the_strips() -> None:
    whole = replace(STRIP, key=0, out_column=10, blocks=[1 << 20])
    strips = Strips([STRIP, whole], 32, CPU)
    # Means of several blocks are made from the sums.
    assert strips.facts.tolist() == [[1, 2, 8, 8, 10, 6, 0, 2, 0], [0, 10, 8, 8, 10, 6, 1, 1, 2]]
    assert strips.facts.shape == (2, FIELDS)
    assert strips.addresses.tolist() == [4096, 8192, 1 << 20]
    assert (strips.count, strips.words, strips.alignment) == (2, 8, 16)
    assert Strips([], 32, CPU).facts.shape == (0, FIELDS)


@pytest.mark.parametrize(
    "change, alignment",
    [({"row_bytes": 40}, 8), ({"row_bytes": 36}, 4), ({"blocks": [4096, 8200]}, 8)],
)
def test_loads_are_as_wide_as_all_rows_allow(change: dict[str, object], alignment: int) -> None:
    assert Strips([STRIP, replace(STRIP, **change)], 32, CPU).alignment == alignment  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "row_bytes, columns, bits, text",
    [
        (34, 8, 32, "whole words of 4 bytes"),
        (28, 8, 32, "at least 32 bytes"),
        (8, 8, 8, "at least 12 bytes"),
        (4, 8, 4, "at least 8 bytes"),
        (12, 8, 16, "at least 16 bytes"),
    ],
)
def test_rows_that_kernels_cannot_read_are_refused(
    row_bytes: int, columns: int, bits: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Strips([replace(STRIP, row_bytes=row_bytes, columns=columns)], bits, CPU)


def test_addresses_that_kernels_cannot_read_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 4 bytes"):
        Strips([replace(STRIP, blocks=[4098])], 32, CPU)
    strips = Strips([STRIP], 32, CPU)
    for blocks in ([4096], [4096, 4100]):
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            strips.move_to(blocks)
    strips.move_to([16, 32])
    assert strips.addresses.tolist() == [16, 32]


def test_the_lowest_position_is_the_first_bad_id() -> None:
    report = new_report(4, CPU)
    assert first_bad_id(report) is None
    report[1:3] = torch.tensor([[2, 40, -1], [0, 7, 99]])
    assert first_bad_id(report) == BadId(0, 7, 99)


WITHOUT = """
import importlib.abc, sys

asked = []

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
import torchrec_bls
assert not asked, asked
# TorchRec asks for Triton, and goes without.
import torchrec_bls.direct.gpu.device, torchrec_bls.direct.gpu.reader
from torchrec_bls import BLSEmbeddingBagCollectionSharder
assert "torchrec_bls.direct.gpu.kernels" not in sys.modules
"""


@pytest.mark.full
def test_cpus_need_no_triton() -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], cwd=ROOT, check=True, timeout=300
    )
