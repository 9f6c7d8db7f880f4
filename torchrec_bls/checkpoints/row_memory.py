"""Memory for rows that are read one step after the other."""

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchrec_bls.lifetime import new_lock

# More than the steps in which tables are read.
_LARGEST_KEPT = 8 << 20


class RowMemory:
    """Gives each read memory of its own, and takes it again when nobody has it any more.

    A general allocator puts small objects into what the last step has freed, and takes more for the
    next step: tens of megabytes in a publication. Threads may ask at the same time.
    """

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)
        # Returns the part of `_kept` that somebody has, or None.
        self._lent: Callable[[], object] = lambda: None
        self._lock = new_lock()

    def rows(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor of any values."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= _LARGEST_KEPT:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            if len(self._kept) < size or self._lent() is not None:
                self._kept = np.empty(size, np.uint8)
            # The tensor's storage holds it, and so do all views of the tensor.
            lent = self._kept[:size]
            self._lent = weakref.ref(lent)
            return torch.from_numpy(lent).view(dtype).view(*shape)
