"""The common part of the bounded-lag sharders."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)

from torchrec_bls._deprecated import config_by_name
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.model_forwards import add_hooks_to_models
from torchrec_bls.distributed.output_device import HOST, gpu_of_outputs, on_host
from torchrec_bls.distributed.outputs.lookup_tables import NAME_THE_FUSED_KERNEL

add_hooks_to_models()

# TorchRec's word for tables in host memory whose outputs are on a GPU.
_FOR_GPUS = (EmbeddingComputeKernel.FUSED_UVM.value,)


def sharding_group(env: ShardingEnv) -> dist.ProcessGroup:
    """Returns the ranks that a module is sharded over; in two dimensions, those of one replica.

    Raises:
        ValueError: the environment has no process group.
    """
    group: dist.ProcessGroup | None = (
        env.sharding_pg
        if isinstance(env, ShardingEnv2D)
        else getattr(env, "process_group", None)  # TorchRec's quantized sharders take dicts, too
    )
    if group is None:
        raise ValueError(
            "the sharding environment has no process group, as that of ShardingEnv.from_local, but "
            "bounded-lag modules are sharded over the processes of one: call "
            "init_process_group, and shard on every rank with "
            "env=ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
        )
    return group


class BoundedLagSharder:
    """Mix-in of the sharders. It comes before TorchRec's own class.

    The parameters are TorchRec's, in its order, and `config` by name:
    `Sharder({"learning_rate": 0.1}, config=BLSConfig(bound=2))`.

    Args:
        fused_params: parameters of TorchRec's fused kernels (optimizer, learning rate, ...).
        qcomm_codecs_registry: an empty registry: codecs of bounded-lag messages are part of
            `config`.
        config: configuration of the exchanges; None: BLSConfig().

    Raises:
        TypeError: an argument is of another type.
        ValueError: codecs are given.
    """

    #: What the planner takes the times of exchanges from.
    exchange_backend: ClassVar[str] = "bls"

    _sharding_types: ClassVar[tuple[str, ...]]
    _kernels: ClassVar[tuple[str, ...]]
    _sharded_module: ClassVar[type]
    # Reasons why a sharding type or kernel of TorchRec is not among them.
    _refused: ClassVar[Mapping[str, str]]

    @config_by_name(BLSConfig)
    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: object = None,
        *,
        config: BLSConfig | None = None,
    ) -> None:
        name = type(self).__name__
        if config is not None and not isinstance(config, BLSConfig):
            raise TypeError(f"{name}: config is {config!r}, but must be a BLSConfig")
        if fused_params is not None and not isinstance(fused_params, dict):
            raise TypeError(f"{name}: fused_params are {fused_params!r}, but must be a dict")
        if qcomm_codecs_registry:
            raise ValueError(
                f"{name} takes no qcomm_codecs_registry: write {name}(config=BLSConfig(codecs=...))"
            )
        # FBGEMM's own check of ids is off by default here: every id is checked before it is sent.
        super().__init__(  # type: ignore[call-arg]
            {"bounds_check_mode": BoundsCheckMode.NONE, **(fused_params or {})}
        )
        self._config = config or BLSConfig()

    @property
    def exchange_bound(self) -> int:
        """Returns the number of iterations that ranks may be apart, for the planner."""
        return self._config.bound

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards `module` by `params`. DistributedModelParallel calls it on every rank.

        With a GPU as `device` the outputs are there, and the tables in host memory: direct lookups
        are the GPU's, and outputs of an exchange are copied to it.

        Raises:
            ValueError: a table has a sharding type or kernel that is not supported, `device` is
                neither the CPU nor a GPU of this process, or `env` has no process group.
        """
        gpu = gpu_of_outputs(device)
        sharding_group(env)
        self._check_plan(module, params, self._kernels if gpu is None else _FOR_GPUS)
        if gpu is not None:
            params, device = on_host(params), HOST
        return self._sharded_module(
            self._config,
            module,
            params,
            env,
            module_fqn,
            gpu,
            fused_params=self.fused_params,  # type: ignore[attr-defined]
            device=device,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that a planner may choose from: those that any table may
        have with this lookup."""
        return [each for each in self._possible_types() if each != ShardingType.GRID_SHARD.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels that a planner may choose from."""
        if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            return list(_FOR_GPUS)
        kernels: list[str] = super().compute_kernels(  # type: ignore[misc]
            sharding_type, compute_device_type
        )
        return kernels

    @property
    def sharded_module_type(self) -> type:
        """Returns the class that `shard` returns."""
        return self._sharded_module

    def _possible_types(self) -> list[str]:
        replicas = () if self._config.lookup != "direct" else (ShardingType.DATA_PARALLEL.value,)
        return [each for each in self._sharding_types if each not in replicas]

    def _check_plan(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        possible_kernels: Sequence[str],
    ) -> None:
        types = self._possible_types()
        for table, parameter in params.items():
            kernels = possible_kernels
            if parameter.sharding_type == ShardingType.DATA_PARALLEL.value:
                # A fused optimizer would give each replica the updates of its own rank alone.
                kernels = (EmbeddingComputeKernel.DENSE.value,)
            for what, planned, possible in (
                ("sharding type", parameter.sharding_type, types),
                ("compute kernel", parameter.compute_kernel, kernels),
            ):
                if planned not in possible:
                    reason = self._refused.get(planned, "")
                    if planned in self._sharding_types:
                        reason = 'lookup="direct" reads shared tables, and these are replicas'
                    cure = (
                        NAME_THE_FUSED_KERNEL
                        if planned == EmbeddingComputeKernel.DENSE.value
                        else "name it in the plan (ParameterConstraints, or the generators of "
                        "sharding_plan)"
                    )
                    raise ValueError(
                        f"{type(self).__name__}: table '{table}' is planned with {what} {planned}, "
                        f"but only {', '.join(possible)} are possible"
                        + (f" with {parameter.sharding_type}" if what == "compute kernel" else "")
                        + (f", since {reason}" if reason else "")
                        + f"; {cure}"
                    )
