"""The module that a model calls for a sharded module, which may be a part of another one."""

from torch import nn
from torchrec.distributed.types import ShardedModule


def owner_of(module: object, model: nn.Module) -> nn.Module:
    """Returns the outermost sharded module that `module` is, or is a part of.

    TorchRec's FeatureProcessedEmbeddingBagCollection is one around another: it changes ids that
    have arrived, before their lookup.

    Args:
        module: sharded module.
        model: model with `module` in it.
    """
    owner: nn.Module = next(
        each
        for each in model.modules()
        if isinstance(each, ShardedModule) and any(part is module for part in each.modules())
    )
    return owner
