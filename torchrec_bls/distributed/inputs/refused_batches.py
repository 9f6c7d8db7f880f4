"""Batches that a rank cannot send, and their treatment on all ranks.

In inference the rank takes part with a batch without samples, so that the others get their rows. It
raises where the embeddings are first used. In training no rank may go on, since gradients of all
ranks belong to one step: all ranks raise where they wait for the ids.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import LazyAwaitable

from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.errors import BatchRefusedError


def refused(group: dist.ProcessGroup, name: str, refusals: Mapping[int, str]) -> Exception:
    """Returns the error to raise on this rank for a batch of training that ranks refused.

    Args:
        group: ranks of the exchange.
        name: name of the exchange.
        refusals: reasons by rank, at least one.
    """
    if group.rank() in refusals:
        return ValueError(refusals[group.rank()])
    origin, reason = next(iter(refusals.items()))
    return BatchRefusedError(
        f"{name} on {rank_name(group)}: {rank_name(group, origin)} refused its batch, so that no "
        f"rank goes on with this one; the next batch is not affected. {reason}"
    )


class RefusedBatchError(ValueError):
    """A batch that does not fit its module."""


class RefusedEmbeddings(LazyAwaitable[Any]):  # type: ignore[misc]
    """The embeddings of a refused batch of inference. They raise when they are used.

    Args:
        nothing: the embeddings of the batch without samples that was sent instead.
        error: error to raise.
    """

    def __init__(self, nothing: LazyAwaitable[Any], error: ValueError) -> None:
        super().__init__()
        self._nothing = nothing
        self._error = error

    def _wait_impl(self) -> Any:
        self._nothing.wait()
        raise self._error
