"""Copies the weights of a module into its shards."""

import torch
from torch import nn


def check_device(device: torch.device | None) -> None:
    """Refuses shards outside of host memory: the exchanges read and write there.

    Args:
        device: device of the shards; None leaves it to TorchRec.

    Raises:
        ValueError: the device is not the CPU.
    """
    if device is not None and device.type != "cpu":
        raise ValueError(
            f"the shards would be on the device '{device}', but bounded-lag modules look up rows "
            "in host memory: shard with device=torch.device('cpu'). The unsharded module may be "
            "on 'meta', if a checkpoint is loaded afterwards"
        )


def load_initial_weights(sharded: nn.Module, module: nn.Module) -> None:
    """Copies the rows and columns that this rank has, where TorchRec leaves random weights.

    On the CPU it leaves them in every EmbeddingBagCollection. It also does so in modules that were
    made on the meta device and have got memory since.

    Args:
        sharded: TorchRec's sharded module.
        module: original module. On the meta device it has no memory, and nothing to copy.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        sharded.load_state_dict(module.state_dict(), strict=False)
