"""Output dists: the embeddings back to the ranks that asked for them, in one message per peer.

Each replaces one of TorchRec's output dists. The rows go straight from the lookup's result, or from
the tables themselves, into the slots of their receivers; the receiver writes its output straight
from its slots.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.distributed.exchange import Exchange, Pending
from torchrec_bls.distributed.inputs.input_dist import IdsLayout, layout_of
from torchrec_bls.distributed.outputs.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables


class EmbeddingsAwaitable(ExchangeAwaitable[torch.Tensor]):
    """The embeddings of this rank's samples, when `finish` returns them."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._finish = finish

    def _wait_impl(self) -> torch.Tensor:
        return self._finish()


class OutputDist(nn.Module):
    """Sends looked-up rows to the ranks that asked for them, and gradients back when training.

    Args:
        rank: this rank.
        exchange: the module's channel for embeddings.
        gradients: its channel for gradients, made at the first forward that needs them.
        gradient_divisors: what TorchRec divides gradients by, one after the other.
        callbacks: what TorchRec's own output dist does to the embeddings once they have arrived.
    """

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        gradients: Exchange,
        gradient_divisors: list[int],
        callbacks: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (),
    ) -> None:
        super().__init__()
        self._rank = rank
        self._exchange = exchange
        self._gradients = gradients
        self._gradient_divisors = gradient_divisors
        self._callbacks = list(callbacks)

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any) -> EmbeddingsAwaitable:
        """Posts the rows and returns the awaitable of this rank's embeddings.

        Args:
            local_embs: rows of the lookup, for the samples of all ranks.
            sharding_ctx: TorchRec's context, which the input dist left its layout in.
        """
        request = Request(self, sharding_ctx, local_embs)
        if torch.is_grad_enabled() and local_embs.requires_grad:
            request.dummy = _Send.apply(request, local_embs)  # type: ignore[no-untyped-call]
        else:
            request.send(local_embs.detach())
        awaitable = EmbeddingsAwaitable(request.finish)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    @abstractmethod
    def post(self, request: "Request", rows: torch.Tensor) -> Pending[torch.Tensor]:
        """Posts `rows`, contiguous, to the ranks that asked for them."""

    @abstractmethod
    def post_gradient(self, request: "Request", gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """Posts the gradient of this rank's output to the ranks that looked the rows up."""

    def divide_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divides in place as TorchRec does unless its users switched that off."""
        if get_gradient_division():
            for divisor in self._gradient_divisors:
                gradient.div_(divisor)
        return gradient


class Request:
    """One forward through an output dist, and its backward."""

    def __init__(self, output_dist: OutputDist, sharding_ctx: Any, local: torch.Tensor) -> None:
        self.dist = output_dist
        self.sharding_ctx = sharding_ctx
        self.layout: IdsLayout = layout_of(sharding_ctx)
        self.shape = local.shape
        self.dtype = local.dtype
        self.pending: Pending[torch.Tensor]
        self.dummy: torch.Tensor | None = None

    def send(self, rows: torch.Tensor) -> None:
        """Posts the rows."""
        self.pending = self.dist.post(self, rows.contiguous())

    def finish(self) -> torch.Tensor:
        """Returns this rank's embeddings."""
        if self.dummy is None:
            return self.pending.wait()
        output: torch.Tensor = _Receive.apply(self, self.dummy)  # type: ignore[no-untyped-call]
        return output


# The two halves of the exchange are two nodes of the autograd graph, as in TorchRec: the gradient's
# exchange starts in the backward of the second and ends in that of the first, and other backward
# work fits in between. The dummy tensor joins them.
class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, rows: torch.Tensor) -> torch.Tensor:
        ctx.request = request
        request.send(rows)
        return rows.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, torch.Tensor]:
        request: Request = ctx.request
        return None, request.dist.divide_gradient(request.pending.wait())


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, dummy: torch.Tensor) -> torch.Tensor:
        ctx.request = request
        ctx.dummy = dummy
        return request.pending.wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        request: Request = ctx.request
        request.pending = request.dist.post_gradient(request, gradient.contiguous())
        return None, torch.zeros_like(ctx.dummy)


def order_of(sharding_ctx: Any) -> torch.Tensor | None:
    """Returns what undoes row-wise bucketizing, as int64."""
    permutation: torch.Tensor | None = sharding_ctx.unbucketize_permute_tensor
    return None if permutation is None else permutation.to(torch.int64).contiguous()


class SequenceOutputDist(OutputDist):
    """For embeddings without pooling: table-wise, column-wise and row-wise EmbeddingCollections.

    Rows are [ids looked up, dim] by feature and rank; outputs [own ids, dim] in the order of the
    ids of this rank.
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
            _native.post_grouped_rows(
                channel, rows.data_ptr(), row_bytes, layout.counts, layout.order, False
            )

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = torch.empty(sum(layout.values_sent), dim, dtype=request.dtype)
            own = (rows.data_ptr(), layout.counts, layout.order)
            return self._collect(arrival, out, layout, order, own)

        return self._exchange.post(send, collect, [rows], layout.number)

    def look_up_and_post(
        self, tables: LookupTables, dim: int, ids: KeyedJaggedTensor, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """Posts rows straight from the tables, in place of a lookup and `forward`. No gradients.

        Args:
            tables: of the lookup.
            dim: columns of its rows.
            ids: what it would look up.
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
        values = ids.values()
        out = torch.empty(sum(layout.values_sent), dim, dtype=tables.dtype)
        own_rows = layout.values_sent[self._rank]
        if order is None:
            first = sum(layout.values_sent[: self._rank])
            own = out[first : first + own_rows]
        else:
            own = torch.empty(own_rows, dim, dtype=tables.dtype)

        def send(channel: _native.Channel) -> None:
            _native.post_table_rows(
                channel,
                tables.by_feature(),
                (values.data_ptr(), values.element_size()),
                values.numel(),
                row_bytes,
                layout.counts,
                layout.order,
                own.data_ptr(),
            )

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._collect(
                arrival, out, layout, order, (own.data_ptr(), [own_rows], [self._rank])
            )

        return EmbeddingsAwaitable(self._exchange.post(send, collect, [], layout.number).wait)

    def _collect(
        self,
        arrival: _native.Arrival,
        out: torch.Tensor,
        layout: IdsLayout,
        order: torch.Tensor | None,
        own: tuple[int, list[int], list[int]],
    ) -> torch.Tensor:
        """Fills `out`; `own` is where rows of this rank for itself lie, grouped by counts and
        ranks."""
        _native.collect_rows(
            arrival,
            out.data_ptr(),
            out.shape[1] * out.element_size(),
            layout.values_sent,
            (0, 0) if order is None else (order.data_ptr(), order.numel()),
            self._rank,
            *own,
        )
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
        blocks = [
            [[(gradient.data_ptr() + first * row_bytes, count * row_bytes, 1, 0)]]
            for first, count in zip(
                accumulate(layout.values_sent, initial=0), layout.values_sent, strict=False
            )
        ]

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = torch.empty(request.shape, dtype=gradient.dtype)
            _native.collect_grouped_rows(
                arrival, out.data_ptr(), row_bytes, layout.counts, layout.order
            )
            return out

        return self._gradients.post(
            lambda channel: channel.post(blocks), collect, [gradient], layout.number
        )


@dataclass(frozen=True)
class ColumnGroup:
    """Consecutive columns of a pooled output, and the ranks whose partial results add up to them.

    Attributes:
        first: lowest of the ranks, which are consecutive.
        count: number of ranks.
        width: columns.
    """

    first: int
    count: int
    width: int


class PooledOutputDist(OutputDist):
    """For pooled embeddings, whatever their sharding.

    Table-wise and column-wise, every rank computes columns of its own; row-wise, all ranks compute
    partial sums of the same columns; table-row-wise, the ranks of a node do. The receiver adds
    partial sums in rank order: one all-to-all stands for TorchRec's reduce-scatter, or for its
    reduce-scatter and all-to-all (docs/design/torchrec-seam.md).

    Rows are [samples of all ranks, columns of this rank's group]; outputs [own samples, columns].

    Args:
        groups: by rank order, covering all columns of the output.
        rank, exchange, gradients, gradient_divisors, callbacks: see OutputDist.
    """

    def __init__(
        self,
        groups: list[ColumnGroup],
        rank: int,
        exchange: Exchange,
        gradients: Exchange,
        gradient_divisors: list[int],
        callbacks: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (),
    ) -> None:
        super().__init__(rank, exchange, gradients, gradient_divisors, callbacks)
        self._groups = groups
        self._offsets = list(accumulate((group.width for group in groups), initial=0))
        self._group_of_rank = [
            index for index, group in enumerate(groups) for _ in range(group.count)
        ]

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
        self, tables: LookupTables, ids: KeyedJaggedTensor, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """Posts sums straight from the tables, in place of a lookup and `forward`. No gradients.

        Args:
            tables: of the lookup, float32.
            ids: what it would look up, without weights.
            sharding_ctx: see `forward`.

        Raises:
            ValueError: a table does not have a row that another rank asks for.
        """
        layout = layout_of(sharding_ctx)
        by_feature = tables.by_feature()
        row_bytes = sum(bytes_of_row for _, _, bytes_of_row in by_feature)
        self._exchange.open(
            max(layout.strides) * row_bytes, max(layout.strides), layout.slot_bytes.embeddings
        )
        values, lengths = ids.values(), ids.lengths()

        def send(channel: _native.Channel) -> None:
            _native.post_pooled_rows(
                channel,
                by_feature,
                (values.data_ptr(), values.element_size()),
                values.numel(),
                (lengths.data_ptr(), lengths.element_size()),
                lengths.numel(),
                [layout.strides[rank] for rank in layout.order],
                layout.order,
            )

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._collect(arrival, layout.strides[self._rank], tables.dtype)

        pending = self._exchange.post(send, collect, [], layout.number)
        awaitable = EmbeddingsAwaitable(pending.wait)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    def _collect(self, arrival: _native.Arrival, batch: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(batch, self._offsets[-1], dtype=dtype)
        if dtype != torch.float32 and any(group.count > 1 for group in self._groups):
            return self._sum_with_torch(arrival, out)
        item = out.element_size()
        groups = [
            (group.first, group.count, offset * item, group.width * item)
            for group, offset in zip(self._groups, self._offsets, strict=False)
        ]
        _native.collect_columns(arrival, out.data_ptr(), batch, out.shape[1] * item, groups)
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
        item = gradient.element_size()
        batch, columns = gradient.shape
        widest = max(group.width for group in self._groups)
        self._gradients.open(batch * widest * item, batch, layout.slot_bytes.gradients)
        blocks = [
            [
                [
                    (
                        gradient.data_ptr() + self._offsets[index] * item,
                        self._groups[index].width * item,
                        batch,
                        columns * item,
                    )
                ]
            ]
            for index in self._group_of_rank
        ]
        batches = [layout.strides[rank] for rank in layout.order]

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = torch.empty(request.shape, dtype=gradient.dtype)
            row_bytes = request.shape[1] * item
            _native.collect_grouped_rows(arrival, out.data_ptr(), row_bytes, batches, layout.order)
            return out

        return self._gradients.post(
            lambda channel: channel.post(blocks), collect, [gradient], layout.number
        )
