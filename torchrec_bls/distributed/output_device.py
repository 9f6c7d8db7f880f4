"""Where the outputs of a sharded module are: on the host, as its tables, or on a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardMetadata,
)

from torchrec_bls.direct.gpu.device import Gpu, gpu_of

#: Device of the shards.
HOST = torch.device("cpu")


def gpu_of_outputs(device: torch.device | None) -> Gpu | None:
    """Returns the GPU that outputs are on; None: they are on the host.

    Args:
        device: device that a module is sharded for; None leaves it to TorchRec.

    Raises:
        ValueError: the device is neither the CPU nor a GPU of this process.
    """
    if device is None or device.type == "cpu":
        return None
    if device.type == "cuda":
        return gpu_of(device)
    raise ValueError(
        f"the shards would be on the device '{device}', but bounded-lag modules look up rows "
        "in host memory: shard with device=torch.device('cpu'). The unsharded module may be "
        "on 'meta', if a checkpoint is loaded afterwards"
    )


def on_host(params: Mapping[str, ParameterSharding]) -> dict[str, ParameterSharding]:
    """Returns a plan with the same shards, all of them in host memory."""
    return {table: _planned_on_host(planned) for table, planned in params.items()}


def _planned_on_host(planned: ParameterSharding) -> ParameterSharding:
    spec: Any = planned.sharding_spec
    if spec is None:  # every rank has the table whole
        return planned
    shards = [
        ShardMetadata(
            shard_offsets=shard.shard_offsets,
            shard_sizes=shard.shard_sizes,
            placement=f"rank:{shard.placement.rank()}/{HOST}",
        )
        for shard in spec.shards
    ]
    return replace(planned, sharding_spec=EnumerableShardingSpec(shards))
