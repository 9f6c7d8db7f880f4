"""An interrupted switch of quantized tables is finished before the next batch, at any line."""

from typing import Any

import pytest
import torch

from tests.direct.interrupts import Interruption
from tests.processes import run
from tests.quant import served
from tests.quant.served import Expected, batches_of, check, check_live, weights_of
from torchrec_bls import publish, serving_state
from torchrec_bls.direct import live_weights
from torchrec_bls.direct.reads import direct_reads
from torchrec_bls.direct.serving import switches
from torchrec_bls.quant import lookups, shared_rows, stored_reads

DEADLINE = 60.0
MODULES = [direct_reads, live_weights, lookups, shared_rows, stored_reads, switches]


def interrupt_all_lines(rank: int) -> int:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    interruption = Interruption(MODULES, KeyboardInterrupt)
    new: dict[int, Any] = {number: weights_of(number) for number in (2, 3)}
    number = 1

    def switch(line: tuple[str, int] | None) -> bool:
        """Publishes, interrupts the next batch, and looks at those after it."""
        nonlocal number
        number = 5 - number if number > 1 else 2
        publish(model, new[number], version=str(number)).wait(DEADLINE)
        interrupted = False
        with interruption.at(line):
            try:
                with torch.no_grad():
                    model(batches[0])
            except KeyboardInterrupt:
                interrupted = True
        assert check(model, batches, expected, 0) == number, line
        assert serving_state(model).problem == "", line
        check_live(model, number)
        return interrupted

    assert not switch(None)
    lines = list(interruption.reached)
    for line in lines:
        assert switch(line), line
    return len(lines)


@pytest.mark.slow
def test_a_switch_is_finished_wherever_it_was_interrupted() -> None:
    (lines,) = run(1, interrupt_all_lines, deadline=600)
    assert lines > 60
