"""Tables that every rank has whole, beside exchanged ones: TorchRec's data-parallel sharding.

There is nothing to exchange for them. Their ids stay on their rank, TorchRec looks them up, and its
DistributedDataParallel averages their gradients.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import Awaitable, NoWait, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.kept_features import kept

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def exchanged(sharding_types: Iterable[str]) -> list[str]:
    """Returns the sharding types that exchange ids and embeddings."""
    return [each for each in sharding_types if each != _DATA_PARALLEL]


def is_replicated(lookup: nn.Module) -> bool:
    """Returns whether a lookup is of data-parallel tables, which TorchRec wraps."""
    return isinstance(lookup, DistributedDataParallel)


class LocalIdsAwaitable(ExchangeAwaitable[Awaitable[KeyedJaggedTensor]]):
    """The two waits of an input dist that sends nothing."""

    def __init__(self, ids: KeyedJaggedTensor) -> None:
        super().__init__()
        self._ids = ids

    def bind(self, sharding_context: Any) -> None:
        """Stores no layout: no embeddings go back."""

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        return NoWait(self._ids)


class _LocalIds:
    def post(self, ids: KeyedJaggedTensor, order: list[int]) -> LocalIdsAwaitable:
        return LocalIdsAwaitable(ids.permute(order) if order else kept(ids))


class LocalIdsDist(nn.Module):
    """Replaces TorchRec's DpSparseFeaturesDist, with the attributes of the exchanged input
    dists."""

    def __init__(self) -> None:
        super().__init__()
        self._dist = _LocalIds()

    def forward(self, ids: KeyedJaggedTensor) -> LocalIdsAwaitable:
        """Returns the awaitable of the awaitable of `ids`."""
        return self._dist.post(ids, [])
