"""Output dists whose rows travel encoded, one frame for each receiver (docs/wire-format.md).

Rows are encoded straight into the slots of their receivers and decoded straight out of them. Rows
of this rank for itself are encoded, too: an embedding is the same wherever its table lies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.equal_rows import EqualRows
from torchrec_bls.distributed.inputs.input_dist import IdsLayout, layout_of
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.output_dist import (
    EmbeddingsAwaitable,
    OutputDist,
    Request,
    order_of,
)
from torchrec_bls.distributed.outputs.output_memory import empty_output
from torchrec_bls.distributed.outputs.pooled_output_dist import PooledOutputDist
from torchrec_bls.distributed.outputs.sequence_output_dist import SequenceOutputDist
from torchrec_bls.distributed.outputs.table_codecs import (
    CodecPlan,
    CodedFeature,
    EncodedFeatures,
    in_force,
)

_ITEM = torch.float32.itemsize


class _Encoding(OutputDist):
    """Mix-in before an output dist.

    Args:
        codecs: codecs of its sharding.
        non_finite: see CodecConfig.
        iteration: function that returns the training's iteration.
        of_output_dist: arguments of the output dist.
    """

    def __init__(
        self, codecs: CodecPlan, non_finite: str, iteration: Callable[[], int], *of_output_dist: Any
    ) -> None:
        super().__init__(*of_output_dist)
        self._codecs = codecs
        self._non_finite = non_finite
        self._iteration = iteration
        self._encoded_at = -1
        self._of_embeddings: list[EncodedFeatures] | None = None
        self._of_gradients = self._encoded(codecs.backward, 0)

    def _codecs_of_embeddings(self) -> list[EncodedFeatures] | None:
        """Returns the codecs of embeddings in this iteration, by rank."""
        iteration = self._iteration() if self._codecs.decays else 0
        if iteration != self._encoded_at:
            self._of_embeddings = self._encoded(self._codecs.forward, iteration)
            self._encoded_at = iteration
        return self._of_embeddings

    def _encoded(
        self, planned: list[list[CodedFeature]] | None, iteration: int
    ) -> list[EncodedFeatures] | None:
        return None if planned is None else in_force(planned, iteration, self._addends())

    def _addends(self) -> list[int]:
        """Returns for each rank how many ranks' rows its receivers add up."""
        return [1] * len(self._codecs.forward or self._codecs.backward or [])


class CodedSequenceOutputDist(_Encoding, SequenceOutputDist):
    """SequenceOutputDist with codecs."""

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs_of_embeddings()
        if codecs is None:
            return super().post(request, rows)
        return self._post_rows(codecs, request.sharding_ctx, rows)

    def look_up_and_post(
        self, tables: LookupTables, dim: int, ids: ArrivedFeatures, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """See SequenceOutputDist."""
        codecs = self._codecs_of_embeddings()
        if codecs is None:
            return super().look_up_and_post(tables, dim, ids, sharding_ctx)
        looked_up = sum(layout_of(sharding_ctx).values_received)
        rows = empty_output((looked_up, dim), tables.dtype)
        _native.copy_table_rows(tables.by_feature, ids.native, rows)
        return EmbeddingsAwaitable(self._post_rows(codecs, sharding_ctx, rows).wait)

    def _post_rows(
        self, codecs: list[EncodedFeatures], sharding_ctx: Any, rows: torch.Tensor
    ) -> Pending[torch.Tensor]:
        layout = layout_of(sharding_ctx)
        order = order_of(sharding_ctx)
        dim = rows.shape[1]

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = self._empty_output((sum(layout.values_sent), dim), torch.float32)
            _native.collect_frames(arrival, _of_samples(codecs, out, layout), False)
            return out if order is None else out[order]

        frames = self._looked_up(codecs, rows, layout)
        target = _Target(self._exchange, layout.slot_bytes.embeddings, layout)
        return _post(target, self._non_finite, rows, frames, collect, summed=False)

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._of_gradients
        if codecs is None:
            return super().post_gradient(request, gradient)
        layout = request.layout
        order = order_of(request.sharding_ctx)
        by_rank = gradient
        if order is not None:
            by_rank = torch.empty_like(gradient)
            by_rank[order] = gradient

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, torch.float32)
            _native.collect_frames(arrival, self._looked_up(codecs, out, layout), True)
            return out

        frames = _of_samples(codecs, by_rank, layout)
        target = _Target(self._gradients, layout.slot_bytes.gradients, layout)
        return _post(target, self._non_finite, by_rank, frames, collect, summed=True)

    def _looked_up(
        self, codecs: list[EncodedFeatures], rows: torch.Tensor, layout: IdsLayout
    ) -> list[_native.Frame]:
        """Returns each rank's part of [ids looked up, dim], by feature and rank."""
        features, world_size = codecs[self._rank].native, len(layout.order)
        first_rows = _first_rows(layout.counts)
        frames = [_native.Frame()] * world_size
        for place, rank in enumerate(layout.order):
            own = slice(place, None, world_size)
            equal = _equal(layout.equal_received, own)
            frames[rank] = _native.Frame.one_below_another(
                features, rows, first_rows[own], layout.counts[own], *equal
            )
        return frames


def _of_samples(
    codecs: list[EncodedFeatures], rows: torch.Tensor, layout: IdsLayout
) -> list[_native.Frame]:
    """Returns each rank's part of [own ids, dim], by rank and feature."""
    counts, first_rows = layout.counts_sent, _first_rows(layout.counts_sent)
    return [
        _native.Frame.one_below_another(
            features.native, rows, first_rows[own], counts[own], *_equal(layout.equal_sent, own)
        )
        for features, own in zip(codecs, _features_by_rank(codecs), strict=True)
    ]


def _first_rows(counts: list[int]) -> list[int]:
    """Returns where each group of rows begins. The groups lie one after the other."""
    return [0, *accumulate(counts)][: len(counts)]


def _features_by_rank(codecs: list[EncodedFeatures]) -> list[slice]:
    """Returns the place of each rank's features among those of all ranks."""
    ends = list(accumulate((each.count for each in codecs), initial=0))
    return [slice(first, end) for first, end in pairwise(ends)]


class CodedPooledOutputDist(_Encoding, PooledOutputDist):
    """PooledOutputDist with codecs. Each partial sum is encoded alone."""

    def _addends(self) -> list[int]:
        return [self._groups[index].count for index in self._group_of_rank]

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs_of_embeddings()
        if codecs is None:
            return super().post(request, rows)
        return self._post_rows(codecs, request.layout, rows)

    def look_up_and_post(
        self, tables: LookupTables, ids: ArrivedFeatures, sharding_ctx: Any
    ) -> EmbeddingsAwaitable:
        """See PooledOutputDist."""
        codecs = self._codecs_of_embeddings()
        if codecs is None:
            return super().look_up_and_post(tables, ids, sharding_ctx)
        layout = layout_of(sharding_ctx)
        shape = (sum(layout.strides), tables.by_feature.row_bytes // _ITEM)
        rows = empty_output(shape, torch.float32)
        _native.sum_rows(tables.by_feature, ids.native, rows)
        awaitable = EmbeddingsAwaitable(self._post_rows(codecs, layout, rows).wait)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    def _post_rows(
        self, codecs: list[EncodedFeatures], layout: IdsLayout, rows: torch.Tensor
    ) -> Pending[torch.Tensor]:
        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._decode(codecs, arrival, layout)

        frames = self._looked_up(codecs, rows, layout)
        target = _Target(self._exchange, layout.slot_bytes.embeddings, layout)
        return _post(target, self._non_finite, rows, frames, collect, summed=False)

    def _decode(
        self, codecs: list[EncodedFeatures], arrival: _native.Arrival, layout: IdsLayout
    ) -> torch.Tensor:
        batch = layout.strides[self._rank]
        features = _features_by_rank(codecs)
        out = self._empty_output((batch, self._offsets[-1]), torch.float32)
        frames: list[_native.Frame] = []
        addends: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank, index in enumerate(self._group_of_rank):
            group = self._groups[index]
            columns, first = out, self._offsets[index]
            if rank != group.first:
                addends.append((out.narrow(1, first, group.width), torch.empty(batch, group.width)))
                columns, first = addends[-1][1], 0
            equal = _equal(layout.equal_sent, features[rank])
            frames.append(
                _native.Frame.side_by_side(codecs[rank].native, columns, 0, batch, first, *equal)
            )
        _native.collect_frames(arrival, frames, False)
        for columns, addend in addends:  # in the order of ranks
            columns.add_(addend)
        return out

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._of_gradients
        if codecs is None:
            return super().post_gradient(request, gradient)
        layout = request.layout

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, torch.float32)
            _native.collect_frames(arrival, self._looked_up(codecs, out, layout), True)
            return out

        frames = [
            _native.Frame.side_by_side(
                of_rank.native,
                gradient,
                0,
                len(gradient),
                self._offsets[index],
                *_equal(layout.equal_sent, features),
            )
            for of_rank, index, features in zip(
                codecs, self._group_of_rank, _features_by_rank(codecs), strict=True
            )
        ]
        target = _Target(self._gradients, layout.slot_bytes.gradients, layout)
        return _post(target, self._non_finite, gradient, frames, collect, summed=True)

    def _looked_up(
        self, codecs: list[EncodedFeatures], rows: torch.Tensor, layout: IdsLayout
    ) -> list[_native.Frame]:
        """Returns each rank's part of [samples of all ranks, columns of this rank]."""
        features, world_size = codecs[self._rank].native, len(layout.order)
        frames = [_native.Frame()] * world_size
        first = 0
        for place, rank in enumerate(layout.order):
            batch = layout.strides[rank]
            # Blocks are by feature and rank.
            equal = _equal(layout.equal_received, slice(place, None, world_size))
            frames[rank] = _native.Frame.side_by_side(features, rows, first, batch, 0, *equal)
            first += batch
        return frames


def _equal(equal: EqualRows | None, part: slice) -> tuple[_native.EqualBags | None, list[int]]:
    """Returns the equal rows of some features, as a frame takes them."""
    return (None, []) if equal is None else (equal.bags, equal.blocks[part])


class _Target(NamedTuple):
    """The target of frames: an exchange, the agreed slots for it, and the layout of the batch."""

    exchange: Exchange
    slot_bytes: int
    layout: IdsLayout


def _post(
    target: _Target,
    non_finite: str,
    rows: torch.Tensor,
    frames: list[_native.Frame],
    collect: Callable[[_native.Arrival], torch.Tensor],
    summed: bool,
) -> Pending[torch.Tensor]:
    """Posts frames whose tables lie in `rows`. Of equal rows the first one travels; of gradients,
    their sum."""
    exchange, slot_bytes, layout = target
    if not exchange.has_slots(slot_bytes):
        largest = max(map(_native.usual_frame_bytes, frames))
        exchange.open(largest, max(layout.strides), slot_bytes)

    def send(channel: _native.Channel) -> None:
        if rows.dtype != torch.float32:
            raise ValueError(
                f"{exchange.name} are {rows.dtype}, but codecs need torch.float32: leave "
                "output_dtype as it is, or the codec fp32 and unique off"
            )
        if non_finite == "refuse" and not rows.isfinite().all():
            bad = int((~rows.isfinite()).any(dim=1).sum())
            raise ValueError(
                f"{exchange.name}: {bad} of {len(rows)} rows hold NaN or infinities, which "
                'non_finite="refuse" does not let pass'
            )
        _native.post_frames(channel, frames, summed)

    return exchange.post(send, collect, [], layout.label)
