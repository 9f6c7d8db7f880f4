"""What the bounded-lag sharders have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv

from torchrec_bls.distributed.config import BLSConfig


class BoundedLagSharder:
    """Mix-in of the sharders, before TorchRec's own.

    Args:
        config: of the exchanges.
        fused_params: of TorchRec's fused kernels (optimizer, learning rate, ...).
        qcomm_codecs_registry: must be empty: codecs of bounded-lag messages stand in `config`.

    Raises:
        ValueError: codecs are given.
    """

    _sharding_types: ClassVar[tuple[str, ...]]
    _kernels: ClassVar[tuple[str, ...]]
    _sharded_module: ClassVar[type]

    def __init__(
        self,
        config: BLSConfig | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if qcomm_codecs_registry:
            raise ValueError(
                "bounded-lag sharders take no qcomm_codecs_registry: use BLSConfig(codecs=...)"
            )
        # FBGEMM's own check of ids is off unless named: every id is checked before it is sent.
        super().__init__(  # type: ignore[call-arg]
            {"bounds_check_mode": BoundsCheckMode.NONE, **(fused_params or {})}
        )
        self._config = config or BLSConfig()

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards `module` by `params`; called by DistributedModelParallel on every rank.

        Raises:
            ValueError: a table has a sharding type or kernel that is not supported.
        """
        self._check_plan(params)
        return self._sharded_module(
            self._config,
            module,
            params,
            env,
            module_fqn,
            fused_params=self.fused_params,  # type: ignore[attr-defined]
            device=device,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns what a planner may choose from."""
        return list(self._sharding_types)

    @property
    def sharded_module_type(self) -> type:
        """The class that `shard` returns."""
        return self._sharded_module

    def _check_plan(self, params: Mapping[str, Any]) -> None:
        for table, parameter in params.items():
            for what, planned, possible in (
                ("sharding type", parameter.sharding_type, self._sharding_types),
                ("compute kernel", parameter.compute_kernel, self._kernels),
            ):
                if planned not in possible:
                    raise ValueError(
                        f"{type(self).__name__}: table '{table}' is planned with {what} {planned}, "
                        f"but only {', '.join(possible)} are possible; name it in the plan "
                        "(ParameterConstraints, or the generators of sharding_plan)"
                    )
