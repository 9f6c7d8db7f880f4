"""TorchRec's awaitable without its profiler range, which costs more than a small exchange.

Channels have ranges of their own, made only while a profiler runs.
"""

from typing import TypeVar

import torch
from torch.compiler import is_compiling
from torchrec.distributed.types import Awaitable

W = TypeVar("W")


class ExchangeAwaitable(Awaitable[W]):  # type: ignore[misc]
    """Base of the awaitables of this package."""

    def wait(self) -> W:
        """Returns the result after its callbacks. torch.compile breaks its graph here."""
        # Asked first: a disabled function costs microseconds even without a compiler.
        return self._wait_uncompiled() if is_compiling() else self._wait()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _wait_uncompiled(self) -> W:
        return self._wait()

    def _wait(self) -> W:
        result: W = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        return result
