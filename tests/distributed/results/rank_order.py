"""TorchRec's collectives on gloo in a form that has a defined order of sums and uneven sizes.

gloo's reduce-scatter adds in an order of its own, and its all-gather refuses uneven sizes. Replaced
by all-to-alls, whose parts are added in rank order, TorchRec's own code is a reference bit for bit
on any number of ranks and for unequal batches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class _Done:
    def wait(self) -> None:
        pass


def _all_to_all(
    group: dist.ProcessGroup, parts: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    received = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        torch.cat([part.reshape(-1) for part in parts]),
        list(sizes),
        [part.numel() for part in parts],
        group=group,
    )
    return list(received.split(list(sizes)))


def _reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, async_op: bool
) -> _Done:
    parts = _all_to_all(group, inputs, [output.numel()] * group.size())
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    output.copy_(total.view_as(output))
    return _Done()


def _reduce_scatter_tensor(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> _Done:
    return _reduce_scatter(output, tensor.chunk(group.size()), group, async_op)


def _all_gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> _Done:
    parts = _all_to_all(group, [tensor] * group.size(), [o.numel() for o in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part.view_as(output))
    return _Done()


def _calls(name: str, replacement: Any, counts: dict[str, int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return replacement(*args, **kwargs)

    return call


@contextmanager
def in_rank_order() -> Iterator[dict[str, int]]:
    """Adds in rank order and gathers uneven sizes while active; yields how often each was used."""
    counts: dict[str, int] = {}
    with (
        mock.patch.object(dist, "reduce_scatter", _calls("reduce", _reduce_scatter, counts)),
        mock.patch.object(
            dist, "reduce_scatter_tensor", _calls("reduce", _reduce_scatter_tensor, counts)
        ),
        mock.patch.object(dist, "all_gather", _calls("gather", _all_gather, counts)),
    ):
        yield counts
