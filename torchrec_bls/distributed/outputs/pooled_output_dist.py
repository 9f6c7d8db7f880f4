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
        columns = [
            (group.first, group.count, offset, group.width)
            for group, offset in zip(groups, self._offsets, strict=False)
        ]
        self._columns = _native.ColumnGroups(columns)
        # The column where this rank's own sums go without a message, and the columns that arrive.
        # Partial sums go through messages, since they are added in rank order.
        index = self._group_of_rank[self._rank]
        self._own_column: int | None = None
        self._arriving = self._columns
        if groups[index].count == 1:
            self._own_column = self._offsets[index]
            self._arriving = _native.ColumnGroups(columns[:index] + columns[index + 1 :])

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        layout = request.layout
        row_bytes = request.shape[1] * rows.element_size()
        self._exchange.open(
            max(layout.strides) * row_bytes, max(layout.strides), layout.slot_bytes.embeddings
        )
        batches = [layout.strides[rank] for rank in layout.order]

        def send(channel: _native.Channel) -> None:
            _native.post_grouped_rows(channel, rows, batches, layout.order, True)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._collect(arrival, layout.strides[self._rank], request.dtype)

        return self._exchange.post(send, collect, [rows], layout.label)

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
        shape = layout.strides[self._rank], self._offsets[-1]
        out = self._empty_output(shape, torch.float32)
        own = self._own_column

        def send(channel: _native.Channel) -> None:
            to_self = (None, 0) if own is None else (out, own)
            _native.post_pooled_rows(channel, tables.by_feature, ids.native, *to_self)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            _native.collect_columns(arrival, out, self._arriving)
            return out

        pending = self._exchange.post(send, collect, [], layout.label)
        awaitable = EmbeddingsAwaitable(pending.wait)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    def _collect(self, arrival: _native.Arrival, batch: int, dtype: torch.dtype) -> torch.Tensor:
        out = self._empty_output((batch, self._offsets[-1]), dtype)
        if dtype != torch.float32 and any(group.count > 1 for group in self._groups):
            return self._sum_with_torch(arrival, out)
        _native.collect_columns(arrival, out, self._columns)
        return out

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
        batch = len(gradient)
        widest = max(group.width for group in self._groups) * gradient.element_size()
        self._gradients.open(batch * widest, batch, layout.slot_bytes.gradients)
        batches = [layout.strides[rank] for rank in layout.order]

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, gradient.dtype)
            _native.collect_grouped_rows(arrival, out, batches, layout.order)
            return out

        def send(channel: _native.Channel) -> None:
            _native.post_columns(channel, gradient, self._columns)

        return self._gradients.post(send, collect, [gradient], layout.label)
