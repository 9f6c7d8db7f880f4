"""Output dists whose rows travel encoded, those for one rank in one frame (docs/wire-format.md).

Rows are encoded straight into the slots of their receivers and decoded straight out of them. Those
of this rank for itself are encoded, too: an embedding is the same wherever its table lies.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.outputs.output_dist import OutputDist, Request, order_of
from torchrec_bls.distributed.outputs.output_memory import empty_output
from torchrec_bls.distributed.outputs.pooled_output_dist import PooledOutputDist
from torchrec_bls.distributed.outputs.sequence_output_dist import SequenceOutputDist
from torchrec_bls.distributed.outputs.table_codecs import CodecPlan, CodedFeature

# The tables of a frame: codec, address, rows, columns, and columns from one row to the next.
Frame = list[tuple[int, int, int, int, int]]

_ITEM = torch.float32.itemsize


class _Encoding(OutputDist):
    """Mix-in before an output dist.

    Args:
        codecs: of its sharding.
        non_finite: see CodecConfig.
        of_output_dist: arguments of the output dist.
    """

    def __init__(self, codecs: CodecPlan, non_finite: str, *of_output_dist: Any) -> None:
        super().__init__(*of_output_dist)
        self._codecs = codecs
        self._non_finite = non_finite


class CodedSequenceOutputDist(_Encoding, SequenceOutputDist):
    """SequenceOutputDist with codecs."""

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs.forward
        if codecs is None:
            return super().post(request, rows)
        layout = request.layout
        order = order_of(request.sharding_ctx)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output((sum(layout.values_sent), request.shape[1]), torch.float32)
            _native.collect_frames(arrival, _of_samples(codecs, out, layout))
            return out if order is None else out[order]

        frames = self._looked_up(codecs, rows, layout)
        target = _Target(self._exchange, layout.slot_bytes.embeddings, layout)
        return _post(target, self._non_finite, rows, frames, collect)

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs.backward
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
            _native.collect_frames(arrival, self._looked_up(codecs, out, layout))
            return out

        frames = _of_samples(codecs, by_rank, layout)
        target = _Target(self._gradients, layout.slot_bytes.gradients, layout)
        return _post(target, self._non_finite, by_rank, frames, collect)

    def _looked_up(
        self, codecs: list[list[CodedFeature]], rows: torch.Tensor, layout: IdsLayout
    ) -> list[Frame]:
        """Returns the part of each rank in [ids looked up, dim], by feature and rank."""
        frames: list[Frame] = [[] for _ in layout.order]
        address, counts = rows.data_ptr(), iter(layout.counts)
        for codec, columns in codecs[self._rank]:
            for rank in layout.order:
                count = next(counts)
                frames[rank].append((codec, address, count, columns, columns))
                address += count * columns * _ITEM
        return frames


def _of_samples(
    codecs: list[list[CodedFeature]], rows: torch.Tensor, layout: IdsLayout
) -> list[Frame]:
    """Returns the part of each rank in [own ids, dim], by rank and feature."""
    frames: list[Frame] = []
    address, counts = rows.data_ptr(), iter(layout.counts_sent)
    for of_rank in codecs:
        frame: Frame = []
        for codec, columns in of_rank:
            count = next(counts)
            frame.append((codec, address, count, columns, columns))
            address += count * columns * _ITEM
        frames.append(frame)
    return frames


class CodedPooledOutputDist(_Encoding, PooledOutputDist):
    """PooledOutputDist with codecs; partial sums are encoded each for itself."""

    def post(self, request: Request, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs.forward
        if codecs is None:
            return super().post(request, rows)
        layout = request.layout

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            return self._decode(codecs, arrival, layout.strides[self._rank])

        frames = self._looked_up(codecs, rows, layout)
        target = _Target(self._exchange, layout.slot_bytes.embeddings, layout)
        return _post(target, self._non_finite, rows, frames, collect)

    def _decode(
        self, codecs: list[list[CodedFeature]], arrival: _native.Arrival, batch: int
    ) -> torch.Tensor:
        out = empty_output((batch, self._offsets[-1]), torch.float32)
        frames: list[Frame] = []
        addends: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank, index in enumerate(self._group_of_rank):
            group = self._groups[index]
            columns = out.narrow(1, self._offsets[index], group.width)
            if rank != group.first:
                addends.append((columns, torch.empty(batch, group.width)))
                columns = addends[-1][1]
            frames.append(_side_by_side(codecs[rank], columns.data_ptr(), batch, columns.stride(0)))
        _native.collect_frames(arrival, frames)
        for columns, addend in addends:  # in the order of ranks
            columns.add_(addend)
        return out

    def post_gradient(self, request: Request, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """See OutputDist."""
        codecs = self._codecs.backward
        if codecs is None:
            return super().post_gradient(request, gradient)
        layout = request.layout
        batch, columns = gradient.shape

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            out = empty_output(request.shape, torch.float32)
            _native.collect_frames(arrival, self._looked_up(codecs, out, layout))
            return out

        frames = [
            _side_by_side(
                of_rank, gradient.data_ptr() + self._offsets[index] * _ITEM, batch, columns
            )
            for of_rank, index in zip(codecs, self._group_of_rank, strict=True)
        ]
        target = _Target(self._gradients, layout.slot_bytes.gradients, layout)
        return _post(target, self._non_finite, gradient, frames, collect)

    def _looked_up(
        self, codecs: list[list[CodedFeature]], rows: torch.Tensor, layout: IdsLayout
    ) -> list[Frame]:
        """Returns the part of each rank in [samples of all ranks, columns of this rank]."""
        frames: list[Frame] = [[] for _ in layout.order]
        address, columns = rows.data_ptr(), rows.shape[1]
        for rank in layout.order:
            batch = layout.strides[rank]
            frames[rank] = _side_by_side(codecs[self._rank], address, batch, columns)
            address += batch * columns * _ITEM
        return frames


def _side_by_side(features: Iterable[CodedFeature], address: int, rows: int, stride: int) -> Frame:
    frame: Frame = []
    for codec, columns in features:
        frame.append((codec, address, rows, columns, stride))
        address += columns * _ITEM
    return frame


class _Target(NamedTuple):
    """Where frames go: an exchange, the slots agreed on for it, and the layout of the batch."""

    exchange: Exchange
    slot_bytes: int
    layout: IdsLayout


def _post(
    target: _Target,
    non_finite: str,
    rows: torch.Tensor,
    frames: list[Frame],
    collect: Callable[[_native.Arrival], torch.Tensor],
) -> Pending[torch.Tensor]:
    """Posts frames whose tables lie in `rows`."""
    exchange, slot_bytes, layout = target
    if not exchange.has_slots(slot_bytes):
        largest = max(map(_native.usual_frame_bytes, frames))
        exchange.open(largest, max(layout.strides), slot_bytes)

    def send(channel: _native.Channel) -> None:
        if rows.dtype != torch.float32:
            raise ValueError(
                f"{exchange.name} are {rows.dtype}, but codecs need torch.float32: leave "
                "output_dtype as it is, or the codec fp32"
            )
        if non_finite == "refuse" and not rows.isfinite().all():
            bad = int((~rows.isfinite()).any(dim=1).sum())
            raise ValueError(
                f"{exchange.name}: {bad} of {len(rows)} rows hold NaN or infinities, which "
                'non_finite="refuse" does not let pass'
            )
        _native.post_frames(channel, frames)

    return exchange.post(send, collect, [], layout.number)
