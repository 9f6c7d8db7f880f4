"""Runs ranks as `torchrec_bls.processes` does, with what only tests need.

Every rank is new: no test sees what another one left behind, and a rank may crash.
"""

import os
from collections.abc import Callable
from typing import Any

from torchrec_bls import processes
from torchrec_bls.processes import Outcome

DEFAULT_DEADLINE = 60.0

# Called by every rank before its function. A fixture may set it.
preparation: Callable[[], None] | None = None

# "fork" where imports take minutes: this process has done them.
_START_METHOD = os.environ.get("TORCHREC_BLS_TEST_START_METHOD", "forkserver")
# What many ranks would import, one after the other.
_PRELOAD = (
    "torchrec_bls.distributed.sharded_ec",
    "torchrec_bls.distributed.sharded_ebc",
    "torchrec_bls.pipeline",
    "torchrec_bls.quant.sharder",
    "torchrec_bls.direct.offers.attach",
    "torchrec_bls.observe",
    "torchrec_bls.overlap",
    "torchrec_bls.sharding.torchrec.planner",
    "torchrec.inference.modules",
    "pytest",
    "hypothesis",
    "tests.distributed.models",
    "tests.frozen",
)


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = DEFAULT_DEADLINE,
    backend: str | None = "gloo",
) -> list[Any]:
    """Calls `function(rank, *args)` on every rank and returns the results by rank.

    Without a backend there is no process group.
    """
    task = (_prepared, preparation, function, args)
    return processes.run(world_size, *task, **_how(deadline, backend, _START_METHOD))


def run_outcomes(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = DEFAULT_DEADLINE,
    fresh_interpreters: bool = False,
    backend: str = "gloo",
) -> list[Outcome]:
    """Like `run`, for ranks that are expected to fail: returns by rank how each one ended.

    Fresh interpreters cost the time of the imports and end as a script does.
    """
    task = (_prepared, preparation, function, args)
    start_method = "spawn" if fresh_interpreters else _START_METHOD
    return processes.outcomes(world_size, *task, **_how(deadline, backend, start_method))


def _how(deadline: float, backend: str | None, start_method: str) -> dict[str, Any]:
    return {
        "deadline_s": deadline,
        "backend": backend,
        "start_method": start_method,
        "preload": _PRELOAD,
    }


def _prepared(
    rank: int,
    prepare: Callable[[], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    if prepare is not None:
        prepare()
    return function(rank, *args)
