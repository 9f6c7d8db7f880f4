"""Batches that a rank cannot send, and what becomes of them on all ranks.

In inference the rank takes part with a batch without samples, so that the others get their rows,
and raises where the embeddings are first used. In training no rank may go on, since gradients of
all ranks belong to one step: all raise where they wait for the ids.
"""

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.types import LazyAwaitable

from torchrec_bls.errors import BatchRefusedError


def refused(rank: int, name: str, refusals: Mapping[int, str]) -> Exception:
    """Returns the error to raise on `rank` for a batch of training that ranks refused.

    Args:
        rank: this one.
        name: of the exchange.
        refusals: reasons by rank, one at least.
    """
    if rank in refusals:
        return ValueError(refusals[rank])
    origin, reason = next(iter(refusals.items()))
    return BatchRefusedError(
        f"{name} on rank {rank}: rank {origin} refused its batch, so that no rank trains on this "
        f"one; the next batch is not affected. {reason}"
    )


class RefusedEmbeddings(LazyAwaitable[Any]):  # type: ignore[misc]
    """Stands for the embeddings of a refused batch of inference, and raises when they are used.

    Args:
        nothing: the embeddings of the batch without samples that was sent instead.
        error: to raise.
    """

    def __init__(self, nothing: LazyAwaitable[Any], error: ValueError) -> None:
        super().__init__()
        self._nothing = nothing
        self._error = error

    def _wait_impl(self) -> Any:
        self._nothing.wait()
        raise self._error
