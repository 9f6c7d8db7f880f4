"""The way of a batch's features to the input dists of a module, without TorchRec's regrouping.

TorchRec copies every batch into the order of its input dists and cuts the copy up. If a dist sends
features as they are, its messages can be gathered from the batch itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.input_dist import IdsAwaitable

_BUCKETIZED = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)


@dataclass(frozen=True)
class Route:
    """The features of one input dist.

    Attributes:
        input_dist: TorchRec's input dist around a BoundedLagIdsDist.
        order: keys of the batch in the order of the dist, by index.
        bucketized: whether the dist cuts features by rows before it sends them.
        in_order: whether the dist takes all keys as they come.
    """

    input_dist: nn.Module
    order: list[int]
    bucketized: bool
    in_order: bool

    def post(self, batch: KeyedJaggedTensor) -> IdsAwaitable:
        """Posts the features of the route."""
        if self.bucketized:
            features = batch if self.in_order else batch.permute(self.order)
            awaitable: IdsAwaitable = self.input_dist(features)
            return awaitable
        direct: Any = self.input_dist._dist
        posted: IdsAwaitable = direct.post(batch, [] if self.in_order else self.order)
        return posted

    @property
    def unbucketize_permute(self) -> torch.Tensor | None:
        """Returns the permutation that brings the last posted rows back into the batch's order, or
        None."""
        # Other dists lack the attribute, and a module takes long to say so.
        input_dist: Any = self.input_dist
        return input_dist.unbucketize_permute_tensor if self.bucketized else None


def plan_routes(
    keys: list[str], shardings: Iterable[tuple[str, Any]], input_dists: Iterable[nn.Module]
) -> list[Route]:
    """Returns the route of each of a module's shardings for batches with `keys`.

    Args:
        keys: keys of the batches.
        shardings: type of each sharding, and TorchRec's sharding.
        input_dists: input dists of the shardings.
    """
    routes = []
    for (sharding_type, sharding), input_dist in zip(shardings, input_dists, strict=True):
        order = [keys.index(feature) for feature in sharding.feature_names()]
        in_order = order == list(range(len(keys)))
        routes.append(Route(input_dist, order, sharding_type in _BUCKETIZED, in_order))
    return routes


class RoutedIdsAwaitable(
    ExchangeAwaitable["RoutedTensorsAwaitable"],
    KJTListSplitsAwaitable[None],  # type: ignore[misc]
):
    """The first wait of routed input dists. It does nothing; the second is
    RoutedTensorsAwaitable's.

    TorchRec's pipelines take `awaitables` and other attributes of the class for their own waits.
    """

    def __init__(self, awaitables: list[IdsAwaitable]) -> None:
        super().__init__(awaitables, ctx=None)

    def _wait_impl(self) -> "RoutedTensorsAwaitable":
        return RoutedTensorsAwaitable(self.awaitables)


class RoutedTensorsAwaitable(ExchangeAwaitable[KJTList]):
    """The joined ids of all shardings."""

    def __init__(self, awaitables: list[IdsAwaitable]) -> None:
        super().__init__()
        self._awaitables = awaitables

    def _wait_impl(self) -> KJTList:
        return KJTList([awaitable.wait().wait() for awaitable in self._awaitables])
