"""The all-to-all of the embeddings, with several under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlrm_plain.model import Dlrm

_FLOAT_BYTES = 4

#: Begins an all-to-all of (received, sent, receive splits, send splits); returns its handle.
Start = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any]


def over(group: dist.ProcessGroup) -> Start:
    """All-to-alls over a group of torch.distributed."""
    return partial(dist.all_to_all_single, group=group, async_op=True)


class EmbeddingExchange:
    """Exchanges all samples of the own tables for all tables of the own samples.

    This is the paper's request class. It has a queue of requests, and of the tensors that they
    fill, in place of one request and one tensor.

    Args:
        model: model whose tables are exchanged.
        rows: samples of a rank.
        start: function that begins an all-to-all.
    """

    def __init__(self, model: Dlrm, rows: int, start: Start) -> None:
        self._start = start
        self._widths = [len(tables) * model.embedding_dim for tables in model.tables_of_rank]
        self._shape = (rows, -1, model.embedding_dim)
        self._send_splits = [rows * len(model.own_tables) * model.embedding_dim] * len(self._widths)
        self._receive_splits = [rows * width for width in self._widths]
        self._rows = rows
        self._under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

    @staticmethod
    def largest_message(model: Dlrm, rows: int) -> int:
        """Bytes that the rank with the most tables sends to each other one."""
        tables = max(len(tables) for tables in model.tables_of_rank)
        return rows * tables * model.embedding_dim * _FLOAT_BYTES

    def post(self, pooled: torch.Tensor) -> None:
        """Begins the exchange of what `apply_emb` has returned."""
        received = torch.empty(sum(self._receive_splits))
        sent = pooled.flatten()  # has to stay until the exchange is completed
        request = self._start(received, sent, self._receive_splits, self._send_splits)
        self._under_way.append((request, sent, received))

    def wait(self) -> torch.Tensor:
        """Completes the oldest exchange; returns (rows, tables, embedding_dim)."""
        request, _, received = self._under_way.popleft()
        request.wait()
        blocks = [
            block.view(self._rows, width)
            for block, width in zip(received.split(self._receive_splits), self._widths, strict=True)
        ]
        return torch.cat(blocks, dim=1).view(self._shape)
