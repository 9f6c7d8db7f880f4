"""Outputs that the host made, on the GPU where they are used."""

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import copied


def copied_to(gpu: Gpu, output: Any) -> Any:
    """Returns a module's output on a GPU. The caller's stream waits for the copy, and the host does
    not.

    Args:
        gpu: the GPU.
        output: KeyedTensor, or JaggedTensors by name, to which nobody writes any more.
    """
    if isinstance(output, KeyedTensor):
        values = gpu.copy_of_output(output.values())
        return KeyedTensor(output.keys(), output.length_per_key(), values, output.key_dim())
    return copied(output, gpu.copy_of_output)
