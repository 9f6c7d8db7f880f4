import numpy as np
import pytest
import torch

from torchrec_bls.distributed.outputs.output_memory import empty_output

MEGA = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(0, 7), (3, 7), (MEGA, 1), (MEGA // 2, 5)])
def test_outputs_are_plain_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    output = empty_output(shape, dtype)
    assert output.shape == shape and output.dtype == dtype and output.is_contiguous()
    output.fill_(1.5)
    assert output.sum(dtype=torch.float64) == 1.5 * shape[0] * shape[1]


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    output = empty_output((3, MEGA), torch.float32)
    address = output.data_ptr()
    view = output[1, :10]
    array = output[2].numpy()
    output[1].fill_(3.0)
    output[2].fill_(4.0)
    del output
    for _ in range(20):  # more than the pool keeps
        other = empty_output((3, MEGA), torch.float32)
        other.fill_(-1.0)
        assert other.data_ptr() != address
    assert torch.equal(view, torch.full((10,), 3.0)) and np.all(array == 4.0)
    del view, array, other
    found = [empty_output((3, MEGA), torch.float32) for _ in range(20)]
    assert address in [each.data_ptr() for each in found]
