"""The output dist of embeddings without pooling."""

from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.exchange import Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_dist import IdsLayout, layout_of
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.output_dist import (
    EmbeddingsAwaitable,
    OutputDist,
    Request,
    order_of,
)
from torchrec_bls.distributed.outputs.output_memory import empty_output


class SequenceOutputDist(OutputDist):
    """The output dist of EmbeddingCollections: table-wise, column-wise and row-wise.

    Rows are [ids looked up, dim] by feature and rank. Outputs are [own ids, dim] in the order of
    this rank's ids.
    """

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        layout = request.layout
        dim = request.shape[1]
        row_bytes = dim * rows.element_size()
        self._exchange.open(
            max(layout.values_received) * row_bytes,
            max(layout.strides),
            layout.slot_bytes.embeddings,
        )
        order = order_of(request.sharding_ctx)

        def send(channel: _native.Channel) -> None:
            _native.post_grouped_rows(channel, rows, layout.counts, layout.order, False)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = self._empty_output((sum(layout.values_sent), dim), request.dtype)
            own = (rows, 0, layout.counts, layout.order)
            return self._collect(arrival, out, layout, order, own)

        return self._exchange.post(send, collect, [rows], layout.label)

    def look_up_and_post(
        self, tables: LookupTables, dim: int, ids: ArrivedFeatures, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """Posts rows straight from the tables, in place of a lookup and `forward`; without
        gradients.

        Args:
            tables: tables of the lookup.
            dim: number of columns of its rows.
            ids: ids to look up.
            sharding_ctx: see `forward`.

        Raises:
            ValueError: a table does not have a row that another rank asks for.
        """
        layout = layout_of(sharding_ctx)
        row_bytes = dim * tables.dtype.itemsize
        self._exchange.open(
            max(layout.values_received) * row_bytes,
            max(layout.strides),
            layout.slot_bytes.embeddings,
        )
        order = order_of(sharding_ctx)
        out = self._empty_output((sum(layout.values_sent), dim), tables.dtype)
        own_rows = layout.values_sent[self._rank]
        by_rank = None  # rows of this rank for itself, if they are not in order
        if order is None:
            own, first = out, sum(layout.values_sent[: self._rank])
        else:
            own = by_rank = empty_output((own_rows, dim), tables.dtype)
            first = 0

        def send(channel: _native.Channel) -> None:
            _native.post_table_rows(channel, tables.by_feature, ids.native, own, first)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            of_self = (own, first, [own_rows], [self._rank])
            return self._collect(arrival, out, layout, order, of_self)

        kept = [] if by_rank is None else [by_rank]
        return EmbeddingsAwaitable(self._exchange.post(send, collect, kept, layout.label).wait)

    def _collect(
        self,
        arrival: _native.Arrival,
        out: torch.Tensor,
        layout: IdsLayout,
        order: torch.Tensor | None,
        own: tuple[torch.Tensor, int, list[int], list[int]],
    ) -> torch.Tensor:
        """Fills `out`. `own` says where the rows of this rank for itself lie: in a tensor, from a
        row of it on, grouped by counts and ranks."""
        _native.collect_rows(arrival, out, layout.values_sent, order, self._rank, *own)
        return out

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        layout = request.layout
        dim = request.shape[1]
        row_bytes = dim * gradient.element_size()
        self._gradients.open(
            max(layout.values_sent) * row_bytes, max(layout.strides), layout.slot_bytes.gradients
        )
        permutation = request.sharding_ctx.unbucketize_permute_tensor
        if permutation is not None:
            by_rank = torch.empty_like(gradient)
            by_rank[permutation] = gradient
            gradient = by_rank
        sent = gradient

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, gradient.dtype)
            _native.collect_grouped_rows(arrival, out, layout.counts, layout.order)
            return out

        def send(channel: _native.Channel) -> None:
            _native.post_rows(channel, sent, layout.values_sent)

        return self._gradients.post(send, collect, [sent], layout.label)
