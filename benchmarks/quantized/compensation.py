"""What carried errors do to the sum of gradients that do not change, without any training."""

import torch

from torchrec_bls.codecs import emulation
from torchrec_bls.codecs.rows import Codec

ITERATIONS = 20
_COLUMNS = 64


def relative_errors(nodes: int, algorithm: str, codec: Codec, compensated: bool) -> list[float]:
    """Reduces the same normal values of each node again and again.

    Args:
        nodes: how many; a power of two.
        algorithm: "ring" or "recursive_doubling".
        codec: of the messages.
        compensated: whether errors are carried forward.

    Returns:
        The RMS error of the first, fifth and last sum relative to the exact one's RMS, and that of
        the mean of all iterations.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(nodes, nodes, _COLUMNS, generator=generator)
    error = torch.zeros_like(values) if compensated else None
    ring = algorithm == "ring"
    reduce = emulation.ring_all_reduce if ring else emulation.recursive_doubling_all_reduce
    exact = values.sum(0)
    mean = torch.zeros_like(exact)
    errors = []
    for _ in range(ITERATIONS):
        found = reduce(values, codec, error)
        errors.append(((found - exact).norm() / exact.norm()).item())
        mean += found / ITERATIONS
    of_mean = ((mean - exact).norm() / exact.norm()).item()
    return [errors[0], errors[4], errors[-1], of_mean]
