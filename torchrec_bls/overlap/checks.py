"""Checks that a DistributedDataParallel can follow a plan, and that all ranks have the same
plan."""

import hashlib
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.plan_file import PlanOrigin

_LAST_BUCKET = "DDP_SET_LAST_BUCKET_CAP"


def check_ddp(ddp: DistributedDataParallel, layers: Sequence[DenseLayer]) -> None:
    """Checks that `ddp` can have the buckets of a plan.

    Raises:
        ValueError: it can't.
    """
    if ddp._comm_hooks:
        hook, _ = ddp._comm_hooks[0]
        raise ValueError(
            f"DistributedDataParallel has the hook {getattr(hook, '__name__', hook)} already, and "
            "takes one: register the plan alone, with codecs=True in place of a hook that encodes"
        )
    if ddp.find_unused_parameters:
        raise ValueError(
            "find_unused_parameters is on, with which DistributedDataParallel never learns the "
            "order of gradients: leave it off, and freeze what is not used"
        )
    if os.environ.get(_LAST_BUCKET):
        raise ValueError(
            f"{_LAST_BUCKET} is set, which reverses the order of buckets' sizes: unset it"
        )
    planned = {
        name: size
        for layer in layers
        for name, size in zip(layer.parameters, layer.sizes, strict=True)
    }
    ignored = ddp.parameters_to_ignore
    found = {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    if planned != found:
        differing = sorted(
            name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name)
        )
        name = differing[0]
        raise ValueError(
            f"the plan is of another model: gradients of '{name}' have "
            f"{_bytes(found.get(name))} here and {_bytes(planned.get(name))} in the plan, and "
            f"{len(differing) - 1} parameters more differ. Make a plan for this model"
        )


def _bytes(size: int | None) -> str:
    return "no place" if size is None else f"{size} bytes"


def check_origin(origin: PlanOrigin, backend: str, group: dist.ProcessGroup) -> None:
    """Checks that a plan was made for ranks like those of `group`.

    Raises:
        ValueError: the plan was made for others.
    """
    here = PlanOrigin(torch.__version__, backend, group.size(), origin.profile)
    if here != origin:
        raise ValueError(
            f"the plan was made for {origin.ranks} ranks over {origin.backend} with torch "
            f"{origin.torch}, but here are {here.ranks} over {here.backend} with torch "
            f"{here.torch}: make a plan for these"
        )


def check_same_on_all_ranks(plan: object, group: dist.ProcessGroup) -> None:
    """Compares a plan between ranks, collectively.

    Raises:
        ValueError: the ranks have different plans; all ranks raise.
    """
    mine = hashlib.sha256(repr(plan).encode()).hexdigest()
    of_ranks: list[str | None] = [None] * group.size()
    dist.all_gather_object(of_ranks, mine, group)
    others = [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]
    if others:
        raise ValueError(
            f"ranks {others} have another plan than rank 0: make it on all ranks together, or load "
            "the same file"
        )
