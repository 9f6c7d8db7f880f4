"""JaggedTensors that cut their embeddings out of a forward's output when they are first used.

52 views of 26 features take longer than the exchange of a small batch. And no model uses all of
them at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node
from torchrec.sparse.jagged_tensor import JaggedTensor


class CutEmbeddings:
    """Embeddings of consecutive features in one tensor.

    Args:
        rows: [ids of all features, dim], feature by feature.
        lengths: [features, samples], in memory that nobody writes to.
        order: features in the order of `rows`, by index.
        counts: number of ids of each feature.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        order: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._rows = rows
        self._lengths = lengths
        self._order = order
        self._counts = counts
        self._cut: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None

    def of(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values and lengths of the feature at a place in the order."""
        if self._cut is None:
            sizes = [self._counts[i] for i in self._order]
            self._cut = torch.split_with_sizes(self._rows, sizes), self._lengths.unbind()
        values, lengths = self._cut
        return values[place], lengths[self._order[place]]

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "CutEmbeddings":
        """Returns the same embeddings in other tensors, two for all features."""
        return CutEmbeddings(copy(self._rows), copy(self._lengths), self._order, self._counts)


class LazyJaggedTensor(JaggedTensor):  # type: ignore[misc]
    """A JaggedTensor without tensors. At its first use it becomes a plain one."""

    _weights = None
    _offsets = None

    @classmethod
    def at(cls, embeddings: CutEmbeddings, place: int) -> JaggedTensor:
        """Returns the JaggedTensor of the feature at `place`, without the checks of TorchRec's
        constructor."""
        lazy = cls.__new__(cls)
        lazy.source = embeddings, place
        return lazy

    def __getattr__(self, name: str) -> Any:
        """Makes the tensors when one is missing: Python calls this for missing ones only."""
        if name not in ("_values", "_lengths"):
            raise AttributeError(f"'JaggedTensor' object has no attribute '{name}'")
        self._become_plain()
        return getattr(self, name)

    def _become_plain(self) -> None:
        source = self.__dict__.get("source")
        if source is None:  # another thread has done it
            return
        embeddings, place = source
        values, lengths = embeddings.of(place)
        self.__dict__.update(_values=values, _lengths=lengths, _weights=None, _offsets=None)
        self.__class__ = JaggedTensor
        self.__dict__.pop("source", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what a plain one does: copies and pickles are plain."""
        self._become_plain()
        return self.__reduce_ex__(protocol)  # now the plain class's method


def copied(
    embeddings: Mapping[str, JaggedTensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, JaggedTensor]:
    """Returns embeddings in other tensors. Lazy ones stay lazy.

    Args:
        embeddings: embeddings by name.
        copy: function that returns the copy of a tensor.
    """
    cuts: dict[CutEmbeddings, CutEmbeddings] = {}
    made = {}
    for name, jagged in embeddings.items():
        if isinstance(jagged, LazyJaggedTensor):
            cut, place = jagged.source
            if cut not in cuts:
                cuts[cut] = cut.copied(copy)
            made[name] = LazyJaggedTensor.at(cuts[cut], place)
            continue
        weights = jagged.weights_or_none()
        made[name] = JaggedTensor(
            values=copy(jagged.values()),
            lengths=copy(jagged.lengths()),
            weights=None if weights is None else copy(weights),
        )
    return made


_plain = SUPPORTED_NODES[JaggedTensor]
register_pytree_node(LazyJaggedTensor, _plain.flatten_fn, _plain.unflatten_fn)
