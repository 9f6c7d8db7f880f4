"""The desk of both protocols: versions, empty requests, callers that leave, and counts."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from tests.serve.fakes import DEADLINE, INPUTS, Model, engine_of, served
from torchrec_bls.serve.desk import Desk
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.waiting import Answer


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return engine_of(model, monkeypatch)


@pytest.fixture
def desk(engine: Engine) -> Desk:
    return Desk(engine, Observer(lambda: None), None, has_front=False)


def head(samples: int, version: str = "", timeout_us: int | None = None) -> RequestHead:
    tensors = TensorHead("dense", "FP32", (samples, 1)), TensorHead("f", "INT64", (samples,))
    return RequestHead(timeout_us, version, tensors)


def contents(*numbers: float) -> list[Any]:
    return [np.array(numbers, dtype=np.float32), np.zeros(len(numbers), dtype=np.int64)]


async def answered(desk: Desk, *numbers: float, **terms: Any) -> Answer:
    with desk.request("http", time.monotonic()) as ticket:
        ticket.admit(head(len(numbers), **terms))
        return await ticket.answer(contents(*numbers))


def ends(desk: Desk) -> list[Outcome]:
    return [each.outcome for each in desk._observer.tally.last]


def test_an_answer(desk: Desk, engine: Engine) -> None:
    answer = served(engine, lambda: answered(desk, 1, 2, version="1"))
    assert answer.outputs["scores"].tolist() == [2, 4]
    assert ends(desk) == [Outcome.OK]


def test_an_empty_request_gets_outputs_without_rows(desk: Desk, engine: Engine) -> None:
    answer = served(engine, lambda: answered(desk))
    assert answer.outputs["scores"].shape == (0,)


def test_another_version(desk: Desk, engine: Engine, model: Model) -> None:
    async def ask() -> None:
        with pytest.raises(RequestError, match="version '2' is not served, but '1' is") as raised:
            await answered(desk, 1, version="2")
        assert raised.value.outcome is Outcome.UNKNOWN
        assert not model.batches

        def change(_: list[float]) -> None:
            model.version = "2"

        model.before = change  # after it was admitted
        with pytest.raises(RequestError, match="version '1' is not served, but '2' is"):
            await answered(desk, 1, version="1")

    served(engine, ask)
    assert ends(desk) == [Outcome.UNKNOWN] * 2


def test_a_timeout_that_is_over(desk: Desk, engine: Engine, model: Model) -> None:
    async def ask() -> None:
        for timeout in (0, -1, -(2**63), 1):
            with pytest.raises(RequestError) as raised:
                await answered(desk, 1, timeout_us=timeout)
            assert raised.value.outcome is Outcome.REFUSED

    served(engine, ask)
    assert not model.batches and ends(desk) == [Outcome.REFUSED] * 4


def test_a_late_answer_is_given_and_counted(desk: Desk, engine: Engine, model: Model) -> None:
    model.before = lambda _: time.sleep(0.3)
    answer = served(engine, lambda: answered(desk, 1, timeout_us=200_000))
    assert answer.outputs["scores"].tolist() == [2]
    assert ends(desk) == [Outcome.LATE]


def test_a_bad_id_is_its_callers_own(desk: Desk, engine: Engine) -> None:
    async def bad() -> None:
        with desk.request("http", time.monotonic()) as ticket:
            ticket.admit(head(1))
            await ticket.answer([np.zeros(1, dtype=np.float32), np.array([10])])

    async def ask() -> list[Any]:
        return await asyncio.gather(bad(), answered(desk, 3), return_exceptions=True)

    error, answer = served(engine, ask)
    assert isinstance(error, RequestError) and "id 10" in error.text
    assert answer.outputs["scores"].tolist() == [6]
    assert INPUTS.features[0].rows == 10


def test_who_leaves(desk: Desk, engine: Engine, model: Model) -> None:
    async def leaving() -> None:
        with desk.request("http", time.monotonic()) as ticket:
            ticket.admit(head(1))
            asyncio.get_running_loop().call_soon(ticket.leave)
            await ticket.answer(contents(1))

    async def left_before() -> None:
        with desk.request("http", time.monotonic()) as ticket:
            ticket.admit(head(1))
            ticket.leave()
            await ticket.answer(contents(1))

    async def ask() -> list[Any]:
        return await asyncio.gather(leaving(), left_before(), return_exceptions=True)

    found = served(engine, ask)
    assert [each.outcome for each in found] == [Outcome.GONE] * 2
    assert ends(desk) == [Outcome.GONE] * 2 and not model.batches


def test_whose_task_is_cancelled(desk: Desk, engine: Engine, model: Model) -> None:
    async def ask() -> None:
        task = asyncio.create_task(answered(desk, 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await answered(desk, 2)

    served(engine, ask)
    assert ends(desk) == [Outcome.GONE, Outcome.OK]
    assert [2] in model.batches


def test_errors_that_nobody_foresaw_are_counted(desk: Desk) -> None:
    with pytest.raises(KeyError), desk.request("grpc", time.monotonic()):
        raise KeyError
    assert ends(desk) == [Outcome.FAILED]


def arrived_s_ago(engine: Engine, at_front: str, *, has_front: bool) -> float:
    desk = Desk(engine, Observer(lambda: None), None, has_front=has_front)
    with desk.request("http", time.monotonic(), at_front) as ticket:
        return time.monotonic() - ticket.arrived


def test_the_time_at_a_front_counts(engine: Engine) -> None:
    five_s_ago = str(int((time.time() - 5) * 1e6))
    assert 5 <= arrived_s_ago(engine, five_s_ago, has_front=True) < 10
    assert arrived_s_ago(engine, five_s_ago, has_front=False) < 5  # a caller has made it up


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_clock_that_was_set_does_not_count(engine: Engine, seconds: float) -> None:
    at_front = str(int((time.time() + seconds) * 1e6))
    assert arrived_s_ago(engine, at_front, has_front=True) < 5


@pytest.mark.parametrize("at_front", ["", "yesterday", "-5", "1e6", "\u0665"])
def test_what_is_no_time_does_not_count(engine: Engine, at_front: str) -> None:
    assert arrived_s_ago(engine, at_front, has_front=True) < 5


def test_it_is_quiet_when_no_request_has_come_for_a_while(desk: Desk) -> None:
    arrivals = []

    async def ask() -> None:
        for _ in range(5):
            with desk.request("http", time.monotonic()):
                arrivals.append(time.monotonic())
            await asyncio.sleep(0.02)

    async def both() -> float:
        asking = asyncio.create_task(ask())
        await desk.await_quiet(0.5, DEADLINE)
        assert asking.done()
        return time.monotonic()

    assert asyncio.run(both()) >= arrivals[-1] + 0.5


def test_if_it_never_gets_quiet_that_is_not_waited_for(desk: Desk) -> None:
    async def ask() -> None:
        while True:
            with desk.request("http", time.monotonic()):
                await asyncio.sleep(0.01)

    async def both() -> None:
        asking = asyncio.create_task(ask())
        await desk.await_quiet(DEADLINE, 0.2)
        asking.cancel()

    began = time.monotonic()
    asyncio.run(both())
    assert time.monotonic() < began + DEADLINE
