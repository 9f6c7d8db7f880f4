"""What can't be planned for, or follow a plan, and what is said."""

import dataclasses
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec_bls.sharding.costs.profile import ProfileError

from tests.overlap.plans import FLOAT32, WIDTH, make_model, plan_of, profile_with
from tests.processes import run
from torchrec_bls import overlap
from torchrec_bls.overlap.quantized_hook import QuantizedAllReduceState, quantized_all_reduce_hook
from torchrec_bls.overlap.search.timeline import Group

BATCH = torch.ones(4, WIDTH)


class Choosing(nn.Module):
    """Two layers, in the order that the batch says, or one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            batch = getattr(self, name)(batch)
        return batch


def mixed() -> nn.Module:
    model = make_model()
    model[2].double()  # type: ignore[operator]
    return model


def refuse_models(rank: int) -> None:
    def refused(model: nn.Module, text: str, *batches: Any) -> None:
        with pytest.raises(ValueError, match=text):
            overlap.plan(model, profile_with(FLOAT32, ranks=1), batches or [BATCH])

    refused(make_model().requires_grad_(False), "has no trainable parameter beside its embedding")
    refused(DistributedDataParallel(make_model()), "in DistributedDataParallel already")
    refused(mixed(), "parameters of torch.float32 on cpu and torch.float64 on cpu")
    refused(nn.Linear(WIDTH, 1, device="meta"), "on 'meta', where no backward can be measured")
    refused(Choosing(), r"batch 0 gives no gradient to \['b.bias', 'b.weight'\]", (BATCH, "a"))
    both = (BATCH, "ab"), (BATCH, "ba")
    refused(Choosing(), "in batch 1 '[ab].bias' comes in place of '[ab].bias'", *both)
    with pytest.raises(ValueError, match=r"codecs are for gradients of float32, not torch.float64"):
        profile = profile_with(FLOAT32, ranks=1)
        overlap.plan(make_model().double(), profile, [BATCH.double()], codecs=True)
    with pytest.raises(ValueError, match="there are no batches"):
        overlap.plan(make_model(), profile_with(FLOAT32, ranks=1), [])
    with pytest.raises(ProfileError, match="all-reduces of gloo among 1 ranks"):
        overlap.plan(make_model(), profile_with(FLOAT32, ranks=2), [BATCH])


def test_models_that_cannot_be_planned_for() -> None:
    run(1, refuse_models)


def refuse_different_models(rank: int) -> None:
    with pytest.raises(ValueError, match="another order on rank 1 than on rank 0"):
        overlap.plan(Choosing(), profile_with(FLOAT32), [(BATCH, "ab" if rank else "ba")])
    wider = nn.Linear(WIDTH, 1 + rank)
    with pytest.raises(ValueError, match="'bias' has 8 bytes on rank 1 and 4 on rank 0: all ranks"):
        overlap.plan(wider, profile_with(FLOAT32), [BATCH])


def test_ranks_with_different_models() -> None:
    run(2, refuse_different_models)


def refuse_on_one_rank(rank: int) -> None:
    """The other rank hears of it, and does not wait for the timeout."""
    text = "" if rank == 1 else "rank 1: "
    with pytest.raises(ValueError, match=f"^{text}the model has no trainable parameter"):
        overlap.plan(make_model().requires_grad_(rank == 0), profile_with(FLOAT32), [BATCH])
    batches = [(BATCH, "ab"), (BATCH, "ba" if rank else "ab")]
    with pytest.raises(ValueError, match=f"^{text}the order in which gradients are ready changes"):
        overlap.plan(Choosing(), profile_with(FLOAT32), batches)
    unused = [(BATCH, "ab"), (BATCH, "a" if rank else "ab")]
    with pytest.raises(ValueError, match=f"^{text}batch 1 gives no gradient to"):
        overlap.plan(Choosing(), profile_with(FLOAT32), unused)
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=rank == 1)
    with pytest.raises(ValueError, match=f"^{text}find_unused_parameters is on"):
        plan_of((Group(1),) * 4).register(ddp)


def test_all_ranks_hear_what_one_refuses() -> None:
    run(2, refuse_on_one_rank)


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(batch)}


def refuse_losses(rank: int) -> None:
    with pytest.raises(ValueError, match="returns a dict that no gradient can be taken of"):
        overlap.plan(NoLoss(), profile_with(FLOAT32, ranks=1), [BATCH])


def test_a_model_without_a_loss() -> None:
    run(1, refuse_losses)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="there is no process group: call init_process_group"):
        overlap.plan(make_model(), profile_with(FLOAT32), [BATCH])


def refuse_ddps(rank: int) -> None:
    plan = plan_of((Group(1),) * 4)
    model = make_model()

    def refused(ddp: nn.Module, text: str, own: Any = plan) -> None:
        with pytest.raises(ValueError, match=text):
            own.register(ddp)

    wider = nn.Sequential(*make_model()[:-1], nn.Linear(WIDTH, 2))
    refused(
        DistributedDataParallel(wider),
        "gradients of '6.bias' have 8 bytes here and 4 bytes in the plan, and 1 parameters more",
    )
    refused(
        DistributedDataParallel(model[:-1]), "gradients of '6.bias' have no place here and 4 bytes"
    )
    refused(model, "is registered with a DistributedDataParallel, not <class .*Sequential")
    refused(
        DistributedDataParallel(model, find_unused_parameters=True), "find_unused_parameters is"
    )
    hooked = DistributedDataParallel(model)
    hooked.register_comm_hook(QuantizedAllReduceState(hooked), quantized_all_reduce_hook)
    refused(hooked, "has the hook quantized_all_reduce_hook already")
    ddp = DistributedDataParallel(model)
    with patch.dict(os.environ, {"DDP_SET_LAST_BUCKET_CAP": "1"}):
        refused(ddp, "DDP_SET_LAST_BUCKET_CAP is set")
    here = "but here are 2 over gloo with torch "
    for changed, text in (
        ({"ranks": 4}, f"made for 4 ranks over gloo with torch .*, {here}"),
        ({"backend": "bls"}, f"made for 2 ranks over bls with torch .*, {here}"),
        ({"torch": "1.0"}, f"made for 2 ranks over gloo with torch 1.0, {here}"),
    ):
        origin = dataclasses.replace(plan.origin, **changed)
        refused(ddp, text, dataclasses.replace(plan, origin=origin))
    refused(
        ddp,
        r"ranks \[1\] have another plan than rank 0",
        plan_of((Group(1 + 2 * rank), Group(3 - 2 * rank))),
    )
    plan.register(ddp)
    refused(ddp, "has the hook planned_all_reduce_hook already")
    dist.barrier()


def test_what_cannot_follow_a_plan() -> None:
    run(2, refuse_ddps)


def refuse_torch(rank: int) -> None:
    def init(module: nn.Module, bucket_cap_mb: int = 25) -> None: ...

    with (
        patch.object(DistributedDataParallel, "__init__", init),
        pytest.raises(ValueError, match=r"has one size for all buckets: plans need torch 2\.13"),
    ):
        overlap.plan(make_model(), profile_with(FLOAT32, ranks=1), [BATCH])


def test_a_torch_without_sizes_by_bucket() -> None:
    run(1, refuse_torch)
