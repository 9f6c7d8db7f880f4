"""The output dist of pooled embeddings."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.exchange import Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_dist import layout_of
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.output_dist import (
    EmbeddingsAwaitable,
    OutputDist,
    Request,
)
from torchrec_bls.distributed.outputs.output_memory import empty_output


@dataclass(frozen=True)
class ColumnGroup:
    """Consecutive columns of a pooled output, and the ranks whose partial results add up to them.

    Attributes:
        first: lowest of the ranks, which are consecutive.
        count: number of ranks.
        width: number of columns.
    """

    first: int
    count: int
    width: int


# The form for native code: first rank, ranks, offset and width in bytes.
_Columns = tuple[int, int, int, int]


class PooledOutputDist(OutputDist):
    """The output dist of pooled embeddings, for all sharding types.

    Table-wise and column-wise, every rank computes its own columns. Row-wise, all ranks compute
    partial sums of the same columns; table-row-wise, the ranks of a node do. The receiver adds
    partial sums in rank order. So one all-to-all replaces TorchRec's reduce-scatter, or its
    reduce-scatter and all-to-all (docs/design/torchrec-seam.md).

    Rows are [samples of all ranks, columns of this rank's group]; outputs [own samples, columns].

    Args:
        groups: groups by rank order, which cover all columns of the output.
        of_output_dist: arguments of OutputDist.
    """

    def __init__(self, groups: list[ColumnGroup], *of_output_dist: Any) -> None:
        super().__init__(*of_output_dist)
        self._groups = groups
        self._offsets = list(accumulate((group.width for group in groups), initial=0))
        self._group_of_rank = [
            index for index, group in enumerate(groups) for _ in range(group.count)
        ]
        self._own_and_arriving = self._split_columns()

    def _split_columns(self) -> tuple[int | None, list[_Columns]]:
        """Returns the byte of an output's rows where this rank's own sums go without a message, and
        the columns that arrive. Partial sums go through messages, since they are added in rank
        order."""
        columns = self._columns_of(torch.float32.itemsize)
        index = self._group_of_rank[self._rank]
        if self._groups[index].count > 1:
            return None, columns
        return columns[index][2], columns[:index] + columns[index + 1 :]

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        layout = request.layout
        row_bytes = request.shape[1] * rows.element_size()
        self._exchange.open(
            max(layout.strides) * row_bytes, max(layout.strides), layout.slot_bytes.embeddings
        )
        batches = [layout.strides[rank] for rank in layout.order]

        def send(channel: _native.Channel) -> None:
            _native.post_grouped_rows(
                channel, rows.data_ptr(), row_bytes, batches, layout.order, True
            )

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._collect(arrival, layout.strides[self._rank], request.dtype)

        return self._exchange.post(send, collect, [rows], layout.number)

    def look_up_and_post(
        self, tables: LookupTables, ids: ArrivedFeatures, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """Posts sums straight from the tables, in place of a lookup and `forward`; without
        gradients.

        Args:
            tables: tables of the lookup, float32.
            ids: ids to look up; their weights, if any, are float32.
            sharding_ctx: see `forward`.

        Raises:
            ValueError: a table does not have a row that another rank asks for.
        """
        layout = layout_of(sharding_ctx)
        largest = max(layout.strides)
        self._exchange.open(
            largest * tables.by_feature.row_bytes, largest, layout.slot_bytes.embeddings
        )
        out = empty_output((layout.strides[self._rank], self._offsets[-1]), torch.float32)
        own, arriving = self._own_and_arriving
        to_self = 0 if own is None else out.data_ptr() + own
        row_bytes = self._offsets[-1] * out.element_size()

        def send(channel: _native.Channel) -> None:
            _native.post_pooled_rows(channel, tables.by_feature, ids.native, to_self, row_bytes)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            _collect_columns(arrival, out, arriving)
            return out

        pending = self._exchange.post(send, collect, [], layout.number)
        awaitable = EmbeddingsAwaitable(pending.wait)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    def _collect(self, arrival: _native.Arrival, batch: int, dtype: torch.dtype) -> torch.Tensor:
        out = empty_output((batch, self._offsets[-1]), dtype)
        if dtype != torch.float32 and any(group.count > 1 for group in self._groups):
            return self._sum_with_torch(arrival, out)
        _collect_columns(arrival, out, self._columns_of(out.element_size()))
        return out

    def _columns_of(self, item_bytes: int) -> list[_Columns]:
        return [
            (group.first, group.count, offset * item_bytes, group.width * item_bytes)
            for group, offset in zip(self._groups, self._offsets, strict=False)
        ]

    def _sum_with_torch(self, arrival: _native.Arrival, out: torch.Tensor) -> torch.Tensor:
        for group, offset in zip(self._groups, self._offsets, strict=False):
            columns = out[:, offset : offset + group.width]
            if columns.numel() == 0:
                continue
            for rank in range(group.first, group.first + group.count):
                part = torch.frombuffer(arrival.view(rank, 0), dtype=out.dtype).view_as(columns)
                if rank == group.first:
                    columns.copy_(part)
                else:
                    columns.add_(part)
        return out

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        layout = request.layout
        item = gradient.element_size()
        batch, columns = gradient.shape
        widest = max(group.width for group in self._groups)
        self._gradients.open(batch * widest * item, batch, layout.slot_bytes.gradients)
        blocks = [
            (
                gradient.data_ptr() + self._offsets[index] * item,
                self._groups[index].width * item,
                batch,
                columns * item,
            )
            for index in self._group_of_rank
        ]
        batches = [layout.strides[rank] for rank in layout.order]

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, gradient.dtype)
            row_bytes = request.shape[1] * item
            _native.collect_grouped_rows(arrival, out.data_ptr(), row_bytes, batches, layout.order)
            return out

        return self._gradients.post(
            lambda channel: channel.post_blocks(blocks), collect, [gradient], layout.number
        )


def _collect_columns(arrival: _native.Arrival, out: torch.Tensor, columns: list[_Columns]) -> None:
    rows, width = out.shape
    _native.collect_columns(arrival, out.data_ptr(), rows, width * out.element_size(), columns)
