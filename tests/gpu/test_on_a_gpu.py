"""What only a GPU can show, where there is one: tables register, and rows are read."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import attached, ids, sharded
from tests.gpu.reads import check_reads
from torchrec_bls.direct.gpu.device import CudaGpu

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of CUDA here"),
]


def test_a_gpu_reads_the_bits_of_the_cpu() -> None:
    check_reads(CudaGpu(torch.device("cuda", 0)))


CHECKS = {**sharded.CHECKS, **ids.CHECKS, **attached.CHECKS}


@pytest.mark.parametrize("name", [each for each in CHECKS if "failing" not in each])
def test_sharded_models_have_their_outputs_on_the_gpu(name: str) -> None:
    CHECKS[name]()
