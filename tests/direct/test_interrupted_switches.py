"""A switch that is interrupted at any line is finished before the next batch."""

import pytest
import torch

from tests.direct import served
from tests.direct.interrupts import Interruption
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.direct.test_publish import check_live
from tests.processes import run
from torchrec_bls import publish, serving_state, version_of
from torchrec_bls.direct import dense_weights, generation, live_weights
from torchrec_bls.direct.reads import direct_reads, float_reads, tables_view
from torchrec_bls.direct.serving import dense_state, dense_versions, gate, served_model, switches

DEADLINE = 60.0
MODULES = [
    dense_state,
    dense_versions,
    dense_weights,
    direct_reads,
    float_reads,
    gate,
    generation,
    live_weights,
    served_model,
    switches,
    tables_view,
]


def interrupt_all_lines(rank: int, error: type[BaseException]) -> int:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    interruption = Interruption(MODULES, error)
    number = 1

    def switch(line: tuple[str, int] | None, times: int) -> bool:
        """Publishes, interrupts the next batch, and looks at those after it."""
        nonlocal number
        number += 1
        publish(model, weights_of(number), version=str(number)).wait(DEADLINE)
        interrupted = False
        with interruption.at(line, times):
            try:
                with torch.no_grad():
                    model(batches[0])
            except (error, ValueError):
                interrupted = True
        served_now = check(model, batches, expected, 0)
        # An error while dense weights are loaded refuses them, and puts the old ones back.
        refused = error is OSError and "refuses its dense weights" in serving_state(model).problem
        assert served_now == (number - 1 if refused else number), (line, times)
        assert refused or serving_state(model).problem == "", (line, times)
        assert check(model, batches, expected, 1) == served_now
        check_live(model, served_now)
        if refused:
            number += 1
            publish(model, weights_of(number), version=str(number)).wait(DEADLINE)
            assert check(model, batches, expected, 0) == number, (line, times)
        return interrupted

    assert not switch(None, 0)
    lines = dict(interruption.reached)
    for line, reached in lines.items():
        # Loops: the first pass, and one in the middle of what they do.
        for times in sorted({1, (reached + 1) // 2}):
            assert switch(line, times), (line, times)
    assert version_of(model) == str(number)
    return len(lines)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.slow)]
)
def test_a_switch_is_finished_wherever_it_was_interrupted(error: type[BaseException]) -> None:
    (lines,) = run(1, interrupt_all_lines, error, deadline=600)
    assert lines > 100
