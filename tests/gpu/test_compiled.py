"""What the kernels become on GPUs, by cross-compilation: no GPU is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchrec_bls.direct.gpu.kernels import rows, sequences, sums
from torchrec_bls.direct.gpu.strips import Strip, Strips

pytestmark = pytest.mark.full

ARCHITECTURES = (80, 90, 100)
_INTEGERS = ("size", "samples", "out_rows", "count", "out_stride")
_TYPES = {"ids": "*i64", "offsets": "*i64", "weights": "*fp32", "out": "*fp32"}


def strips_of(row_bytes: int, columns: int, bits: int, address: int = 1 << 20) -> Strips:
    strip = Strip(0, 0, columns, row_bytes, 1000, 1000, False, [address])
    return Strips([strip], bits, torch.device("cpu"))


def ptx_of(
    kernel: Any, strips: Strips, architecture: int, out: str = "*fp32", **constants: Any
) -> str:
    """Compiles a kernel as its launch would, for ids and an output whose memory is aligned."""
    element = torch.int32 if out == "*i32" else torch.float32
    known = {**rows.tile_of(strips, torch.empty(1, 128, dtype=element)), **constants}
    options = {name: known.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    weightless = not known.get("WEIGHTED", False)
    if weightless and "weights" in kernel.arg_names:
        known["weights"] = None
    types = _TYPES | {"out": out}
    signature = {
        name: "constexpr"
        if name in known
        else "i32"
        if name in _INTEGERS
        else types.get(name, "*i64")
        for name in kernel.arg_names
    }
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, known, aligned)
    target = GPUTarget("cuda", architecture, 32)
    text: str = triton.compile(source, target=target, options=options).asm["ptx"]
    return text


def spilled(ptx: str, architecture: int, folder: Path) -> list[str]:
    """How many bytes of registers ptxas writes to memory, and reads from it."""
    tools = triton.knobs.nvidia
    tool = tools.ptxas if architecture < 90 else tools.ptxas_blackwell
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    name = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert name is not None
    command = [tool.path, "-v", f"--gpu-name={name[1]}", str(source), "-o", str(folder / "cubin")]
    told = subprocess.run(command, text=True, capture_output=True, check=True).stderr
    return re.findall(r"(\d+) bytes spill", told)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sums_add_as_the_cpu_does(architecture: int, tmp_path: Path) -> None:
    ptx = ptx_of(sums._sum_bags, strips_of(256, 64, 32), architecture, WEIGHTED=False)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "add.f32" in ptx or "add.rn.f32" in ptx
    assert not re.search(r"(fma|mad)\S*\.f32", ptx), "a product of which nobody knows"
    assert not re.search(r"\.ftz|div\.(full|approx)", ptx), "other bits than the CPU's"
    assert spilled(ptx, architecture, tmp_path) == ["0", "0"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weighted_sums_are_fused(architecture: int, tmp_path: Path) -> None:
    ptx = ptx_of(sums._sum_bags, strips_of(256, 64, 32), architecture, WEIGHTED=True)
    assert "fma.rn.f32" in ptx
    assert not re.search(r"\.ftz|div\.(full|approx)", ptx)
    assert spilled(ptx, architecture, tmp_path) == ["0", "0"]


@pytest.mark.parametrize("bits, row_bytes", [(16, 128), (8, 80), (4, 48), (2, 32)])
def test_stored_rows_are_read_whole(bits: int, row_bytes: int, tmp_path: Path) -> None:
    ptx = ptx_of(sums._sum_bags, strips_of(row_bytes, 64, bits), 90, WEIGHTED=False)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert ("fma.rn.f32" in ptx) == (bits < 16)
    assert not re.search(r"\.ftz|div\.(full|approx)", ptx)
    assert spilled(ptx, 90, tmp_path) == ["0", "0"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_are_of_16_bytes(architecture: int, tmp_path: Path) -> None:
    strips = strips_of(256, 64, 32)
    ptx = ptx_of(sequences._write_rows, strips, architecture, "*i32", COPIED=True)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert ".f32" not in ptx
    assert spilled(ptx, architecture, tmp_path) == ["0", "0"]


@pytest.mark.parametrize("row_bytes, address, vector", [(40, 1 << 20, "v2"), (256, 4, "b32")])
def test_unaligned_rows_are_read_as_they_lie(row_bytes: int, address: int, vector: str) -> None:
    strips = strips_of(row_bytes, row_bytes // 4, 32, address)
    ptx = ptx_of(sequences._write_rows, strips, 90, "*i32", COPIED=True)
    assert "ld.global.v4" not in ptx
    assert f"ld.global.{vector}" in ptx
