"""What pytest does in a run of TorchRec's tests: each example on ranks is recorded by itself."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from torchrec.distributed.test_utils.multi_process import MultiProcessTestBase

from torchrec_bls import processes

#: Environment variable with the path of the record.
RECORD = "TORCHREC_BLS_SUITE_RECORD"
_RANKS_DEADLINE_S, _TEST_DEADLINE_S = 90.0, 300
_PRELOAD = (
    "torchrec.distributed.test_utils.test_model_parallel",
    "torchrec.distributed.test_utils.test_model_parallel_base",
    "tests.torchrec_suite.sharders",
)
_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "GLOO_DEVICE_TRANSPORT")

# Both runs see the same examples, whatever fails.
settings.register_profile(
    "suite",
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("suite")

_outcomes: dict[str, str] = {}
_examples: list[str] = []


def _run_ranks(
    self: Any, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any
) -> None:
    """Stands for the method of MultiProcessTestBase, whose pool hangs when a rank dies. A failure
    does not end the test: the next example follows."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        processes.run(
            world_size,
            _on_rank,
            callable,
            {**kwargs, "world_size": world_size},
            inherited,
            deadline_s=_RANKS_DEADLINE_S,
            preload=_PRELOAD,
        )
        _examples.append("passed")
    except processes.RanksFailedError as error:
        _examples.append(f"{error.failed[0].error}: {error.failed[0].message}")


def _on_rank(
    rank: int, function: Callable[..., None], kwargs: dict[str, Any], inherited: dict[str, str]
) -> None:
    os.environ.update(inherited)
    function(rank=rank, **kwargs)


MultiProcessTestBase._run_multi_process_test = _run_ranks


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Records the examples that a test drew."""
    _examples.clear()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(_TEST_DEADLINE_S)
    yield
    signal.alarm(0)
    for number, outcome in enumerate(_examples):
        _outcomes[f"{item.nodeid} example {number + 1}"] = outcome
    if _examples:
        _outcomes.pop(item.nodeid, None)


def _too_late(*_: object) -> None:
    raise TimeoutError(f"the test did not end in {_TEST_DEADLINE_S} s")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Records a test of one process."""
    if report.when == "call" or not report.passed:
        text = ""
        if report.failed and report.longrepr is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(crash.message if crash else report.longrepr)
        _outcomes[report.nodeid] = text or report.outcome


def pytest_sessionfinish() -> None:
    """Writes the record."""
    Path(os.environ[RECORD]).write_text(json.dumps(_outcomes, indent=1))
