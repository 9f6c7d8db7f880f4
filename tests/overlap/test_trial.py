"""A plan that is tried beside the defaults, by a clock that is set by hand."""

from collections.abc import Iterator
from itertools import cycle, repeat
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.dlrm import make_batch, make_whole_dlrm
from tests.overlap.plans import FLOAT32, WIDTH, make_model, profile_with, trying_all_plans
from tests.processes import run
from torchrec_bls import overlap
from torchrec_bls.overlap.hook import PlannedAllReduce
from torchrec_bls.overlap.measured import trial
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.modes.mode import Mode

BATCH = torch.ones(4, WIDTH)
# Microseconds of three turns on two ranks: with the plan, and by the two defaults.
TIMES = (((10.0, 20.0, 30.0), (12.0, 20.0, 25.0)), ((11.0, 19.0, 30.0), (9.0, 22.0, 29.0)))
SLOWEST = (11.0, 20.0, 30.0), (12.0, 22.0, 29.0)


def clock_of(rank: int) -> Iterator[list[float]]:
    for turn in cycle(TIMES[rank]):
        for us in turn:
            yield from repeat([us], trial._TIMED)


def tried(rank: int, seconds: float) -> tuple[trial.Trial, int]:
    """The trial of a plan, and how many buckets its hook reduced."""
    group, model, reduced = dist.group.WORLD, make_model(), []
    assert group is not None
    plan = overlap.plan(model, profile_with(Mode("float32", ModeTimes(1.0, 0, 0, 1.0))), [BATCH])
    assert plan.trial is None  # nothing is predicted to be gained
    reduce = PlannedAllReduce.reduce

    def noting(state: PlannedAllReduce, bucket: Any) -> Any:
        reduced.append(bucket)
        return reduce(state, bucket)

    clock = "torchrec_bls.overlap.measured.timed_backwards.Clock.since_begin_us"
    with (
        patch.object(trial, "_SECONDS", seconds),
        patch.object(PlannedAllReduce, "reduce", noting),
        patch(clock, side_effect=clock_of(rank)),
    ):
        found = trial.try_out(
            model, [BATCH], group, plan._buckets_argument(), lambda ddp: plan._follow(ddp, group)
        )
    assert all(parameter.grad is None for parameter in model.parameters())
    return found, len(reduced)


@pytest.mark.parametrize(
    ("seconds", "turns"), [(0.0, trial._LEAST_TURNS), (1e3, trial._MOST_TURNS)]
)
def test_the_slowest_rank_counts_in_each_turn(seconds: float, turns: int) -> None:
    first, second = run(2, tried, seconds)
    assert first == second
    found, buckets = first
    by_turn = list(
        zip(found.planned_us, found.ddp_default_us, found.torchrec_default_us, strict=True)
    )
    assert by_turn == [SLOWEST[turn % 2] for turn in range(turns)]
    # One bucket in each backward of the plan, none of the defaults.
    assert buckets == turns * (trial._WARM_UP + trial._TIMED)


def try_dlrm(rank: int) -> None:
    """Its tables are the model's own, and no gradient gets to them."""
    model, wrapped = make_whole_dlrm(), []
    tables = [each for name, each in model.named_parameters() if "embedding_bags" in name]
    for each in tables:
        each.grad = torch.ones_like(each)
    wrap = trial._wrapped

    def noting(module: nn.Module, *arguments: Any) -> Any:
        wrapped.append(module)
        return wrap(module, *arguments)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with patch.object(trial, "_wrapped", noting), trying_all_plans():
        plan = overlap.plan(model, profile_with(FLOAT32), [make_batch(rank, 0)])
    assert plan.trial is not None and len(wrapped) >= 3 * trial._LEAST_TURNS
    for copied in wrapped:
        shared = [each for name, each in copied.named_parameters() if "embedding_bags" in name]
        assert all(mine is theirs for mine, theirs in zip(tables, shared, strict=True))
    assert all(each.grad is not None and bool((each.grad == 1).all()) for each in tables)
    assert not any(hasattr(each, "_ddp_ignored") for each in tables)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    own = {id(each) for each in model.parameters()} - {id(each) for each in tables}
    assert not own & {id(each) for copied in wrapped for each in copied.parameters()}


def test_tables_are_shared_and_the_dense_part_is_copied() -> None:
    run(2, try_dlrm)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise TypeError("it holds a socket")


def refuse_a_copy(rank: int) -> None:
    model = Uncopied(WIDTH, WIDTH) if rank else nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    text = "" if rank else "rank 1: "
    refused = pytest.raises(
        ValueError, match=f"^{text}the plan can't be tried on a copy .*a socket"
    )
    with refused, trying_all_plans():
        overlap.plan(model, profile_with(FLOAT32), [BATCH])


def test_a_model_that_cannot_be_copied() -> None:
    run(2, refuse_a_copy)


def refuse_other_profiles(rank: int) -> None:
    """One predicts a gain and the other none: both would wait for each other."""
    mode = FLOAT32 if rank else Mode("float32", ModeTimes(1.0, 0, 0, 1.0))
    with pytest.raises(ValueError, match=r"ranks \[1\] have another plan than rank 0"):
        overlap.plan(make_model(), profile_with(mode), [BATCH])


def test_ranks_with_other_profiles_make_no_trial() -> None:
    run(2, refuse_other_profiles)
