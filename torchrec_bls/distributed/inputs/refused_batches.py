"""Batches that a rank cannot send, and their treatment on all ranks.

In inference the rank takes part with a batch without samples, so that the others get their rows. It
raises where the embeddings are first used. In training no rank may go on, since gradients of all
ranks belong to one step: all ranks raise where they wait for the ids.
"""

import sys
from collections.abc import Callable, Mapping
from itertools import count
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
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
        f"rank trains on this one; the next batch is not affected. {reason}"
    )


class RefusedBatchError(ValueError):
    """A batch that does not fit its module."""


class RefusedEmbeddings(LazyAwaitable[Any]):  # type: ignore[misc]
    """The embeddings of a refused batch of inference. They raise when they are used.

    Args:
        nothing: the embeddings of the batch without samples that was sent instead.
        error: error to raise.
        before: function that is called first.
    """

    def __init__(
        self, nothing: LazyAwaitable[Any], error: ValueError, before: Callable[[], None]
    ) -> None:
        super().__init__()
        self._nothing = nothing
        self._error = error
        self._before = before

    def _wait_impl(self) -> Any:
        self._nothing.wait()
        self._before()
        raise self._error


class Calls:
    """How often a module was called, and when last, in comparison with other modules."""

    _clock = count(1)

    def __init__(self) -> None:
        self.number = 0
        self.last = 0

    def note(self) -> None:
        """Counts a call."""
        self.number += 1
        self.last = next(self._clock)


def take_part_in_the_rest(module: Any) -> None:
    """Takes part, without samples, in the calls that the failed forward does not reach.

    The forward would have called other modules after `module`, and the other ranks do call them. It
    is the forward of the outermost module on the stack that contains `module`. It calls each of its
    sharded modules once. So the modules that it has not called are one call behind.
    """
    modules: list[Any] = list(_outermost_caller(module).modules())
    rest = [
        other
        for other in modules
        if isinstance(getattr(other, "calls", None), Calls)
        and not other.reads_directly
        and other.calls.number == module.calls.number - 1
    ]
    for other in sorted(rest, key=lambda each: each.calls.last):
        context = other.create_context()
        ids = other.post(context, other.nothing()).wait().wait()
        other.compute_and_output_dist(context, ids).wait()


def _outermost_caller(module: nn.Module) -> nn.Module:
    outermost = module
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and any(each is module for each in caller.modules()):
            outermost = caller
        frame = frame.f_back
    return outermost
