"""The compiled module links no torch, so that one wheel serves every release of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchrec_bls import _native

from .linkage import ALLOWED_LIBRARIES, Linkage, read_linkage


def test_the_module_links_python_and_the_c_libraries_alone() -> None:
    linkage = read_linkage(Path(_native.__file__))
    assert linkage.faults() == []
    assert linkage.exported == {"PyInit__native"}
    assert "libc.so.6" in linkage.libraries
    assert any(name.startswith("GLIBC_") for name in linkage.versions)
    assert "PyModule_Create2" in linkage.unversioned or "PyModuleDef_Init" in linkage.unversioned


def test_a_library_that_links_torch_is_found() -> None:
    """The check can fail: this one is built as an extension of torch is."""
    faults = read_linkage(Path(torch.__file__).parent / "lib" / "libshm.so").faults()
    assert "needs libc10.so" in faults
    assert any(re.match(r"wants _ZN.*3c10", fault) for fault in faults)


@pytest.mark.parametrize(
    ("libraries", "unversioned", "exported", "fault"),
    [
        ({"libibverbs.so.1"}, set(), set(), "needs libibverbs.so.1"),
        (set(), {"_ZN2at5emptyEv"}, set(), "wants _ZN2at5emptyEv of no known library"),
        (set(), {"aoti_torch_empty"}, set(), "wants aoti_torch_empty of no known library"),
        (set(), set(), {"_ZN3bls7ChannelD1Ev"}, "exports _ZN3bls7ChannelD1Ev"),
    ],
)
def test_faults_are_named(
    libraries: set[str], unversioned: set[str], exported: set[str], fault: str
) -> None:
    linkage = Linkage(
        frozenset(libraries | ALLOWED_LIBRARIES),
        frozenset(unversioned | {"PyList_New", "__gmon_start__"}),
        frozenset(),
        frozenset(exported | {"PyInit__native"}),
    )
    assert linkage.faults() == [fault]
