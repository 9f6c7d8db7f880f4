"""TorchRec's awaitable without its profiler range, which costs more than a small exchange.

Channels have ranges of their own, made only while a profiler runs.
"""

from typing import TypeVar

import torch
from torchrec.distributed.types import Awaitable

W = TypeVar("W")


class ExchangeAwaitable(Awaitable[W]):  # type: ignore[misc]
    """Base of the awaitables of this package."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> W:
        """Returns the result after its callbacks; torch.compile breaks its graph here."""
        result: W = self._wait_impl()
        for callback in self.callbacks:
            result = callback(result)
        return result
