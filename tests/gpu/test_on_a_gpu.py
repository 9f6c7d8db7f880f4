"""What only a GPU can show, where there is one: tables register, and rows are read."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import attached, captured, ids, sharded
from tests.gpu.reads import check_reads
from torchrec_bls.direct.gpu.device import CudaGpu

CHECKS = {**sharded.CHECKS, **ids.CHECKS, **attached.CHECKS, **captured.CHECKS}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of CUDA here"),
]


def test_a_gpu_reads_the_bits_of_the_cpu() -> None:
    check_reads(CudaGpu(torch.device("cuda", 0)))


def test_nobody_waits_for_the_copy_of_an_output() -> None:
    gpu = CudaGpu(torch.device("cuda", 0))
    expected = torch.randn(1000, 64)
    born_pinned = gpu.empty_output((1000, 64), torch.float32).copy_(expected)
    for output in (born_pinned, expected.clone()):
        torch.cuda._sleep(10**8)  # the caller's stream is busy
        torch.cuda.set_sync_debug_mode("error")
        try:
            copy = gpu.copy_of_output(output)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(copy.cpu(), expected)


@pytest.mark.parametrize("name", [each for each in CHECKS if "failing" not in each])
def test_sharded_models_have_their_outputs_on_the_gpu(name: str) -> None:
    CHECKS[name]()
