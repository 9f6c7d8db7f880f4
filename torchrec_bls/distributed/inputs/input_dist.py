"""Input dist: sends the ids of a batch to the ranks that hold their rows, one message per peer.

It replaces TorchRec's KJTAllToAll, which exchanges splits, lengths and values one after the other.
"""

from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.exchanges.slot_growth import SlotBytes, SlotGrowth
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.equal_rows import EqualRows, UniqueRows
from torchrec_bls.distributed.inputs.posted_calls import PostedCalls
from torchrec_bls.distributed.inputs.refused_batches import refused


class IdsLayout:
    """How ids came to the rank that looks them up. Their embeddings go back the same way.

    Attributes:
        native: arrived batch with its ids.
        label: label of the call, see Forwards. Rows and gradients carry it, too.
        order: ranks in the order of their samples in the batch that is looked up.
        strides: batch size of each rank.
        values_sent: number of ids that this rank sent to each rank.
        counts_sent: number of ids that this rank sent, one entry for each rank and each of that
            rank's features, rank by rank; only where rows are encoded.
        equal_sent: equal rows among those that come for this rank's ids, by rank and feature like
            `counts_sent`; None where nobody asks.
        equal_received: equal rows among those that this rank looks up, by feature and rank like
            `counts`.
        slot_bytes: slot sizes of the exchanges, for this batch.
    """

    def __init__(self, native: _native.BatchIds, order: list[int], own: "_Batch") -> None:
        self.native = native
        self.label = own.label
        self.order = order
        self.strides = native.strides
        self.values_sent = own.sent
        self.counts_sent = own.counts_sent
        self.equal_sent = next(iter(own.equal), None)
        self.equal_received: EqualRows | None = None
        self.slot_bytes = own.slot_bytes

    @cached_property
    def counts(self) -> list[int]:
        """Returns the number of ids by feature and, within a feature, by rank in `order`,
        flattened."""
        return self.native.counts

    @cached_property
    def values_received(self) -> list[int]:
        """Returns the number of ids that each rank sent to this one."""
        return self.native.values_per_source

    @property
    def all_ended(self) -> bool:
        """Returns whether no rank has a batch any more."""
        return self.native.all_ended

    @property
    def updates(self) -> int:
        """Returns the number of updates of the weights that all ranks have ready."""
        return self.native.updates

    @property
    def refusals(self) -> dict[int, str]:
        """Returns the reasons of ranks that refuse to go on with this batch, by rank."""
        refusals = self.native.refusals
        return {rank: reason.decode(errors="replace") for rank, reason in refusals}


def layout_of(sharding_context: Any) -> IdsLayout:
    """Returns the layout that the input dist leaves in TorchRec's sharding context.

    TorchRec's TrainPipelineSparseDist, when it is attached anew, posts the ids of a batch once
    more, with a new context. It looks up the ids of the first post, so that nobody has waited for
    the new context's own.
    """
    awaitable: IdsTensorsAwaitable | None = sharding_context.bls_ids
    if awaitable is not None:
        awaitable.wait()
    layout: IdsLayout = sharding_context.bls_ids_layout
    return layout


def first_layout(ctx: Any) -> IdsLayout | None:
    """Returns how the ids of a batch came, once they have been waited for; None if none are sent.

    Args:
        ctx: TorchRec's context of the batch.
    """
    layouts = (getattr(each, "bls_ids_layout", None) for each in ctx.sharding_contexts)
    return next((layout for layout in layouts if layout is not None), None)


class _Batch(NamedTuple):
    """The facts that this rank knows about a batch whose ids it has posted. `sent`, `counts_sent`
    and the one item of `equal`, if any, become fields of IdsLayout."""

    number: int
    label: int
    local_keys: list[str]
    is_weighted: bool
    slot_bytes: SlotBytes
    sent: list[int]
    counts_sent: list[int]
    equal: list[EqualRows]


class IdsTensorsAwaitable(ExchangeAwaitable[KeyedJaggedTensor]):
    """The second wait of an input dist. Its result is the joined ids of all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        pending: Pending[tuple[ArrivedFeatures, IdsLayout]],
        calls: PostedCalls,
    ) -> None:
        super().__init__()
        self._group = group
        self._name = name
        self._pending = pending
        self._calls = calls
        self._sharding_context: Any = None

    def _wait_impl(self) -> KeyedJaggedTensor:
        ids, layout = self._pending.wait()
        refusals = layout.refusals
        if refusals:
            self._calls.refuse(layout.label)
            raise refused(self._group, self._name, refusals)
        context, self._sharding_context = self._sharding_context, None
        if context is not None:
            self._fill(context, layout)
        return ids

    def bind(self, sharding_context: Any) -> None:
        """See IdsAwaitable."""
        self._sharding_context = sharding_context
        sharding_context.bls_ids = self

    @staticmethod
    def _fill(context: Any, layout: IdsLayout) -> None:
        context.bls_ids = None
        context.bls_ids_layout = layout
        context.batch_size_per_rank = layout.strides
        if hasattr(context, "input_splits"):  # for sequence embeddings
            context.input_splits = layout.values_sent
            context.output_splits = layout.values_received


class IdsAwaitable(ExchangeAwaitable[IdsTensorsAwaitable]):
    """The first wait of an input dist. It waits for nothing, since sizes travel with the data."""

    def __init__(self, tensors: IdsTensorsAwaitable) -> None:
        super().__init__()
        self._tensors = tensors

    def bind(self, sharding_context: Any) -> None:
        """Sets the TorchRec context that gets the layout when the ids have arrived."""
        self._tensors.bind(sharding_context)

    def _wait_impl(self) -> IdsTensorsAwaitable:
        return self._tensors


class BoundedLagIdsDist(KJTAllToAll):  # type: ignore[misc]
    """Redistributes a KeyedJaggedTensor whose keys are ordered by destination rank.

    It takes the place of the KJTAllToAll in TorchRec's sparse features dists. TorchRec's pipelines
    check for that class before they replace it.

    Args:
        group: ranks to exchange with.
        splits: number of keys for each rank.
        stagger: number of nodes for table-row-wise sharding, whose batches TorchRec orders by
            local rank first; else 1.
        exchange: the module's channel for ids.
        growth: growth of the slots of its sharding type's exchanges.
        calls: calls of the module, of which the newest is posted.
        count_keys: whether the way back needs `IdsLayout.counts_sent`.
        unique: questions about equal rows on the way back; None if there are none.
        id_type: dtype of ids in messages, the same on all ranks. Batches may be of another one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        splits: list[int],
        stagger: int,
        exchange: Exchange,
        growth: SlotGrowth,
        calls: PostedCalls,
        count_keys: bool,
        unique: UniqueRows | None,
        id_type: torch.dtype = torch.int64,
    ) -> None:
        super().__init__(group, splits, stagger)
        rank, world_size = group.rank(), group.size()
        self._rank: int = rank
        self._splits: list[int] = splits
        self._first_key = [0, *accumulate(splits)]
        self._local = slice(self._first_key[rank], self._first_key[rank + 1])
        local_size = world_size // stagger
        self._order = [x + local_size * y for x in range(local_size) for y in range(stagger)]
        self._exchange = exchange
        self._growth = growth
        self._calls = calls
        self._count_keys = count_keys
        self._unique = unique
        self._id_type = id_type

    def __setattr__(self, name: str, value: Any) -> None:
        """Keeps the forward. TorchRec's pipelines replace it to fuse the exchanges of splits.

        There is no such exchange here. The pipelines accept an awaitable without one.

        Raises:
            ValueError: the bound is not 0: the depth of these pipelines is fixed.
        """
        if name != "forward":
            super().__setattr__(name, value)
        elif self._exchange.bound > 0:
            raise ValueError(
                f"a TorchRec pipeline runs a module of bound {self._exchange.bound}, but has a "
                "depth of its own: use BoundedLagPipeline, or BLSConfig(bound=0)"
            )

    def forward(self, ids: KeyedJaggedTensor) -> IdsAwaitable:
        """Posts `ids`. Returns the awaitable of the awaitable of this rank's share."""
        return self.post(ids, [])

    def post(
        self, ids: KeyedJaggedTensor, order: list[int], batch: int | None = None
    ) -> IdsAwaitable:
        """Posts the keys of `ids` that `order` names, by destination rank. An empty one means all.

        Args:
            ids: ids of this rank.
            order: keys, by index.
            batch: number of samples that slots are sized for; None: that of `ids`.
        """
        lengths = _for_messages(ids.lengths(), torch.int32)
        values = _for_messages(ids.values(), self._id_type)
        weights = ids.weights_or_none()
        weights = None if weights is None else _for_messages(weights, torch.float32)
        stride = ids.stride()
        self._exchange.make_room()
        number, slot_bytes = self._growth.begin()
        if not self._exchange.has_slots(slot_bytes.ids):
            samples = stride if batch is None else batch
            largest = self._largest_message(ids, order, weights is not None)
            self._exchange.open(largest, samples, slot_bytes.ids)
        label, note = self._calls.newest
        wanted = self._growth.wanted()
        keys = ids.keys()
        local_keys = [keys[i] for i in order[self._local]] if order else keys[self._local]
        tensors = [lengths, values] if weights is None else [lengths, values, weights]
        own = _Batch(number, label, local_keys, weights is not None, slot_bytes, [], [], [])
        if self._count_keys:
            own.counts_sent.extend(_values_per_key(ids, order))

        def send(channel: _native.Channel) -> None:
            own.sent.extend(
                _native.post_ids(
                    channel,
                    lengths,
                    values,
                    weights,
                    len(keys),
                    stride,
                    self._splits,
                    order,
                    note.ended,
                    note.refusal,
                    note.updates,
                    wanted,
                )
            )
            # The other ranks have their ids by now, and read them meanwhile. TorchRec's lookups use
            # weights even in modules that are not weighted. With weights, bags of equal ids differ.
            if self._unique is not None and weights is None:
                counts = ids.length_per_key()
                own.equal.append(self._unique.sent(lengths, values, stride, counts, order))

        def collect(arrival: _native.Arrival) -> tuple[ArrivedFeatures, IdsLayout]:
            return self._put_together(arrival, own)

        pending = self._exchange.post(send, collect, tensors, label)
        self._growth.posted()
        return IdsAwaitable(
            IdsTensorsAwaitable(self._pg, self._exchange.name, pending, self._calls)
        )

    def _put_together(
        self, arrival: _native.Arrival, own: "_Batch"
    ) -> tuple[ArrivedFeatures, IdsLayout]:
        native = _native.BatchIds(arrival, len(own.local_keys), self._order)
        self._growth.learn(own.number, native.wanted_slot_bytes)
        layout = IdsLayout(native, self._order, own)
        ids = ArrivedFeatures.of(native, own.local_keys, own.is_weighted)
        if self._unique is not None and not native.weight_bytes:
            layout.equal_received = self._unique.received(
                self._rank,
                ids.lengths(),
                ids.values(),
                [layout.strides[rank] for rank in self._order],
                layout.counts,
            )
        return ids, layout

    def _largest_message(self, ids: KeyedJaggedTensor, order: list[int], weighted: bool) -> int:
        item = self._id_type.itemsize + weighted * torch.float32.itemsize
        per_key = _values_per_key(ids, order)
        lengths_of_key: int = ids.stride() * torch.int32.itemsize
        return max(
            sum(per_key[first : first + count]) * item + count * lengths_of_key
            for first, count in zip(self._first_key, self._splits, strict=False)
        )


def _for_messages(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `tensor` as messages have it. Their dtypes follow from the module, not from a batch:
    all ranks need the same, and a rank may have no batch or one of other dtypes."""
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


def _values_per_key(ids: KeyedJaggedTensor, order: list[int]) -> list[int]:
    """Returns the number of values of each key that `order` names. An empty one means all."""
    per_key: list[int] = ids.length_per_key()
    return [per_key[i] for i in order] if order else per_key
