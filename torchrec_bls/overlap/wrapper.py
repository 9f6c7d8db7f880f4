"""Plans under TorchRec's DistributedModelParallel."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv


class PlannedDataParallelWrapper(DefaultDataParallelWrapper):  # type: ignore[misc]
    """Wraps the unsharded part in DistributedDataParallel, with the buckets of a plan.

    Args:
        ddp_kwargs: arguments of DistributedDataParallel from the plan.
        register: function that gives the wrapped module to the plan.
    """

    def __init__(
        self, ddp_kwargs: dict[str, Any], register: Callable[[DistributedDataParallel], None]
    ) -> None:
        super().__init__(ddp_kwargs=ddp_kwargs)
        self._register = register

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wraps the model. DistributedModelParallel calls it.

        Raises:
            ValueError: the plan is for another model; see `OverlapPlan.register`.
        """
        super().wrap(dmp, env, device)
        wrapped = dmp._dmp_wrapped_module
        if not isinstance(wrapped, DistributedDataParallel):
            raise ValueError(
                "the plan is of another model: here nothing is left beside sharded tables"
            )
        self._register(wrapped)
