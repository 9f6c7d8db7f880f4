"""An engine with a model that the test plays."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from torchrec_bls.serve import engine, waiting
from torchrec_bls.serve.batches import dense_of
from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.inputs import Feature, Features, ModelInputs
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.predictor import Costs, Predictor

T = TypeVar("T")
# Seconds after which a test that hangs fails.
DEADLINE = 30
INPUTS = ModelInputs([Feature("f", 10)], 1, False, 1000)


def asked(numbers: Sequence[float]) -> Features:
    """Returns a request whose samples are numbers."""
    count = len(numbers)
    return Features(
        count,
        np.array(numbers, dtype=np.float32).reshape(-1, 1),
        np.zeros(0, dtype=np.int64),
        np.zeros(count, dtype=np.int32),
        None,
        np.zeros(1, dtype=np.int64),
        (False,),
    )


class Model:
    """Answers with twice each number.

    Attributes:
        version: its version.
        batches: numbers of each batch.
        before: called with the numbers of each batch before it is answered.
        model: itself, where the engine looks for its version.
    """

    def __init__(self) -> None:
        self.version = "1"
        self.batches: list[list[float]] = []
        self.before: Callable[[list[float]], None] = lambda numbers: None
        self.model = self

    def answered(self, requests: Sequence[Features]) -> dict[str, NDArray[np.float32]]:
        numbers = dense_of(requests).numpy()
        self.batches.append(numbers[:, 0].tolist())
        self.before(self.batches[-1])
        return {"scores": 2 * numbers[:, 0]}


def engine_of(model: Any, patch: pytest.MonkeyPatch, **terms: Any) -> Engine:
    """Returns an engine whose batches have 20 samples at most, which take 2 ms by prediction."""
    patch.setattr(waiting, "LONGEST_BATCH", 0.002)
    patch.setattr(waiting, "LONGEST_TURN", 0.002)
    patch.setattr(engine, "reading_modules", lambda of: {"": of})
    predictor = Predictor([(1, 0, 1e-3)])
    predictor.costs = Costs(0.6e-3, 0.68e-4, 0.0)
    predictor.observe = lambda *_: None  # type: ignore[method-assign]
    contract = Contract(**{"deadline_ms": 20_000, **terms})
    return Engine(model, INPUTS, predictor, contract, Observer(lambda: None))


def served(engine: Engine, ask: Callable[[], Awaitable[T]]) -> T:
    """Runs the engine for as long as a test asks."""

    async def both() -> T:
        work = asyncio.create_task(engine.run())
        try:
            return await asyncio.wait_for(ask(), DEADLINE)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    return asyncio.run(both())
