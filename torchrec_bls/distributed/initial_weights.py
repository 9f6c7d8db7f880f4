"""The weights of a module into the shards that were made of it."""

import torch
from torch import nn


def check_device(device: torch.device | None) -> None:
    """Refuses shards outside of host memory, which the exchanges read and write.

    Args:
        device: of the shards; None leaves it to TorchRec.

    Raises:
        ValueError: it is not the CPU.
    """
    if device is not None and device.type != "cpu":
        raise ValueError(
            f"the shards would be on the device '{device}', but bounded-lag modules look up rows "
            "in host memory: shard with device=torch.device('cpu'). The unsharded module may be "
            "on 'meta', if a checkpoint is loaded afterwards"
        )


def load_initial_weights(sharded: nn.Module, module: nn.Module) -> None:
    """Copies the rows and columns that this rank has, where TorchRec leaves random weights.

    It does that on the CPU for every EmbeddingBagCollection, and for modules that were made on the
    meta device and have got memory since.

    Args:
        sharded: TorchRec's sharded module.
        module: that it was made of. One without memory, on the meta device, has nothing to copy.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        sharded.load_state_dict(module.state_dict(), strict=False)
