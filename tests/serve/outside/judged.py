"""What the calls of several clients have in common: whether the answers are right."""

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
Outputs = Mapping[str, NDArray[np.float32]]
# Function that asks with the tensors of a case.
Ask = Callable[[Sequence[Any]], Awaitable[Outputs]]


def array_of(tensor: Mapping[str, Any]) -> NDArray[Any]:
    return np.array(tensor["data"], _DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


async def judge(clients: Mapping[str, Callable[[str, str, str], Ask]]) -> int:
    """Asks by each client, and prints how many answers are right. Returns the exit status.

    Args:
        clients: functions of the place for HTTP, that for gRPC and the model's name.
    """
    said = json.load(sys.stdin)
    cases, failed = said["cases"], 0
    for name, client in clients.items():
        ask = client(said["http"], said["grpc"], said["model"])
        right, problem = await _right_answers(ask, cases)
        failed += right != len(cases)
        print(f"{name:26}  {right} of {len(cases)} answers are right  {problem[:200]}", flush=True)
    return 1 if failed else 0


async def _right_answers(ask: Ask, cases: Sequence[Any]) -> tuple[int, str]:
    """Returns how many answers are right, and what was wrong with the last one of the others."""
    right, problem = 0, ""
    for case in cases:
        try:
            outputs = await ask(case["tensors"])
            for name, values in case["scores"].items():
                # Topics are differences of sums near 1000.
                atol = 1e-3 if name == "topics" else 1e-6
                np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=atol)
            right += 1
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return right, problem
