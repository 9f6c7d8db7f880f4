"""The modules of a model that read tables."""

from collections.abc import Mapping

from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.pipeline import bounded_lag_modules

ReadingModule = BoundedLagModule | AttachedCollection


def reading_modules(model: nn.Module) -> dict[str, ReadingModule]:
    """Returns the modules of a sharded or attached model that read tables, by name.

    Raises:
        ValueError: there is none, or an embedding module was sharded by another sharder.
    """
    attached: dict[str, ReadingModule] = {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, AttachedCollection)
    }
    return attached or {**bounded_lag_modules(model)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns a model without DistributedModelParallel."""
    return model.module if isinstance(model, DistributedModelParallel) else model


def reads_of(modules: Mapping[str, ReadingModule]) -> list[AnyReads]:
    """Returns the direct reads of each module.

    Raises:
        ValueError: a module exchanges embeddings, or was not called yet.
    """
    without = {name: module for name, module in modules.items() if module.direct_reads is None}
    uncalled = [
        name
        for name, module in without.items()
        if isinstance(module, BoundedLagModule) and module.awaits_first_call
    ]
    if exchanging := sorted(without.keys() - set(uncalled)):
        raise ValueError(
            f"modules {exchanging} do not read their tables directly, but exchange embeddings: "
            'shard with BLSConfig(lookup="direct")'
        )
    if uncalled:
        raise ValueError(
            f"modules {uncalled} were not called yet, and share their tables in the first call: "
            "call the model once before"
        )
    return [module.direct_reads for module in modules.values() if module.direct_reads is not None]
