"""Steps of small models run through DistributedModelParallel on real ranks."""

import pytest
from torchrec_bls.sharding.calibration.step_models import (
    ModelRanges,
    StepTask,
    draw_step_model,
    plans_by_hand,
)
from torchrec_bls.sharding.calibration.steps import measure_steps

RANGES = ModelRanges(tables=(3, 3), rows=(60, 90), dims=(8, 16), pooling=(1, 3), batch=(4, 8))


def task(number: int, backend: str, training: bool) -> StepTask:
    model = draw_step_model("model", (number,), RANGES)
    job = model.job(2, 2, backend, training=training)
    plans = plans_by_hand(model.workload(2), job)
    return StepTask(model, backend, training, plans, turns=3)


@pytest.mark.full
def test_steps_of_all_kinds_are_measured() -> None:
    tasks = [
        task(number, backend, training)
        # Pooled and not; some have both.
        for number, (backend, training) in enumerate(
            [("bls", True), ("bls", False), ("gloo", True), ("gloo", False)] * 2
        )
    ]
    assert {c.pooled for each in tasks for c in each.model.collections} == {True, False}
    measured = list(measure_steps(2, tasks, pinned=True))
    assert len(measured) == len(tasks)
    for each, times in zip(tasks, measured, strict=True):
        assert list(times) == list(each.plans)
        for us in times.values():
            assert len(us) == 3
            assert min(us) > 0
