"""What carried errors do to the sum of gradients that do not change, without any training."""

from __future__ import annotations

import torch

from torchrec_bls.codecs import emulation
from torchrec_bls.codecs.rows import Codec

ITERATIONS = 20
_COLUMNS = 64


def relative_errors(
    nodes: int, algorithm: str, codec: Codec, compensated: bool
) -> tuple[list[float], float]:
    """Reduces the same normal values of each node again and again.

    Args:
        nodes: how many; a power of two.
        algorithm: "ring" or "recursive_doubling".
        codec: of the messages.
        compensated: whether errors are carried forward.

    Returns:
        By iteration the RMS error of the sum relative to the exact one's RMS, and the same of the
        mean of all iterations.
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
    return errors, ((mean - exact).norm() / exact.norm()).item()
