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


class ArrivedFeatures(KeyedJaggedTensor):  # type: ignore[misc]
    """A KeyedJaggedTensor whose tensors are made at their first use, in the memory of `native`."""

    #: The ids of the batch.
    native: _native.BatchIds

    @classmethod
    def of(
        cls, native: _native.BatchIds, keys: list[str], is_weighted: bool = False
    ) -> "ArrivedFeatures":
        """Returns the features of a batch, without TorchRec's constructor.

        Args:
            native: ids of the batch.
            keys: keys of the features that this rank looks up.
            is_weighted: whether this rank's own batch has weights. It counts if no rank has
                samples.
        """
        lazy = cls.__new__(cls)
        lazy.native = native
        lazy.unmade = keys, is_weighted
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

    def record_stream(self, stream: object) -> None:
        """Does nothing: no stream uses them, and tensors of the host can't record any."""

    def __reduce_ex__(self, _: Any) -> Any:
        """Returns what a plain one does: copies and pickles are plain."""
        plain = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        self.values()
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != "native"})
        return copy.copy, (plain,)

    def _make(self, keys: list[str], is_weighted: bool) -> None:
        ids = self.native
        has_weights = bool(ids.weight_bytes) or (is_weighted and not ids.total_stride)
        value_type = _INTEGERS.get(ids.value_bytes, torch.int64)
        length_per_key = ids.values_per_feature
        KeyedJaggedTensor.__init__(
            self,
            keys=keys,
            values=_tensor(ids.values, value_type),
            weights=_tensor(ids.weights, torch.float32) if has_weights else None,
            lengths=_tensor(ids.lengths, torch.int32),
            stride=ids.total_stride,
            length_per_key=length_per_key,
            offset_per_key=[0, *accumulate(length_per_key)],
        )


def _tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)


_plain = SUPPORTED_NODES[KeyedJaggedTensor]
register_pytree_node(ArrivedFeatures, _plain.flatten_fn, _plain.unflatten_fn)
