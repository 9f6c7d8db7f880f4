"""Copies the weights of a module into its shards."""

from typing import Any

import torch.distributed as dist
from torch import nn

from torchrec_bls.distributed.data_parallel import is_replicated


def load_initial_weights(sharded: nn.Module, module: nn.Module) -> None:
    """Copies the rows and columns that this rank has, where TorchRec leaves random weights.

    On the CPU it leaves them in every EmbeddingBagCollection. It also does so in modules that were
    made on the meta device and have got memory since. Tables that every rank has whole start from
    those of the first rank, collectively, as in TorchRec: ranks may have made their modules with
    other seeds.

    Args:
        sharded: TorchRec's sharded module.
        module: original module. On the meta device it has no memory, and nothing to copy.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    sharded.load_state_dict(module.state_dict(), strict=False)
    lookups: Any = sharded._lookups
    for lookup in lookups:
        if is_replicated(lookup):
            first = dist.get_global_rank(lookup.process_group, 0)
            for parameter in lookup.parameters():
                dist.broadcast(parameter.detach(), first, lookup.process_group)
