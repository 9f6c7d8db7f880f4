"""The ids that a rank looks up, as native code has joined them.

A lookup that reads tables takes the ids where they lie. TorchRec's own lookups take a
KeyedJaggedTensor. Making one costs more than joining the ids of a small batch. So it is made only
when somebody asks for it.
"""

import copy
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native

_INTEGERS = {4: torch.int32, 8: torch.int64}
_FLOATS = {2: torch.float16, 4: torch.float32, 8: torch.float64}
_BY_SIZE = (_INTEGERS, _INTEGERS, _FLOATS)


class ArrivedFeatures(KeyedJaggedTensor):  # type: ignore[misc]
    """A KeyedJaggedTensor whose tensors are made at their first use, in the memory of `native`."""

    #: The ids of the batch.
    native: _native.BatchIds

    @classmethod
    def of(
        cls, native: _native.BatchIds, keys: list[str], dtypes: list[torch.dtype]
    ) -> "ArrivedFeatures":
        """Returns the features of a batch, without TorchRec's constructor.

        Args:
            native: ids of the batch.
            keys: keys of the features that this rank looks up.
            dtypes: dtypes of lengths, values and, if there are any, weights of this rank's own
                batch.
        """
        lazy = cls.__new__(cls)
        lazy.native = native
        lazy.unmade = keys, dtypes
        return lazy

    def __getattr__(self, name: str) -> Any:
        """Makes the tensors when an attribute is missing: Python calls this for missing ones
        only."""
        unmade = self.__dict__.get("unmade")
        if unmade is not None:
            self._make(*unmade)  # two threads may do it twice, with the same result
            self.__dict__.pop("unmade", None)
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"'KeyedJaggedTensor' object has no attribute '{name}'")

    def __reduce_ex__(self, _: Any) -> Any:
        """Returns what a plain one does: copies and pickles are plain."""
        plain = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        self.values()
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != "native"})
        return copy.copy, (plain,)

    def _make(self, keys: list[str], own_dtypes: list[torch.dtype]) -> None:
        ids = self.native
        dtypes = _dtypes(ids, own_dtypes)
        memory = (ids.lengths, ids.values, ids.weights)
        lengths, values, *weights = (
            torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
            for view, dtype in zip(memory, dtypes, strict=False)
        )
        length_per_key = ids.values_per_feature
        KeyedJaggedTensor.__init__(
            self,
            keys=keys,
            values=values,
            weights=weights[0] if weights else None,
            lengths=lengths,
            stride=ids.total_stride,
            length_per_key=length_per_key,
            offset_per_key=[0, *accumulate(length_per_key)],
        )


def _dtypes(ids: _native.BatchIds, own: list[torch.dtype]) -> list[torch.dtype]:
    """Returns the dtypes of lengths, values and weights. Those of this rank's batch say more than
    sizes do, but a batch without samples may have any dtypes."""
    sizes = [ids.length_bytes, ids.value_bytes]
    if ids.weight_bytes:
        sizes.append(ids.weight_bytes)
    if not ids.total_stride or sizes == [dtype.itemsize for dtype in own]:
        return own
    return [by_size[size] for by_size, size in zip(_BY_SIZE, sizes, strict=False)]


_plain = SUPPORTED_NODES[KeyedJaggedTensor]
register_pytree_node(ArrivedFeatures, _plain.flatten_fn, _plain.unflatten_fn)
