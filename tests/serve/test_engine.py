"""The engine gives each request its own answer, or says why it has none."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.serve.fakes import DEADLINE, Model, asked, engine_of, served
from torchrec_bls.errors import DrainedError
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.waiting import Answer, Request


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return engine_of(model, monkeypatch)


def submit(engine: Engine, numbers: Sequence[float], within: float = 1e3) -> Request:
    now = time.monotonic()
    return engine.submit(asked(numbers), now + within, now)


async def outcomes(requests: Sequence[Request]) -> list[Any]:
    """Returns the scores of each request, or its outcome."""
    answers = await asyncio.gather(*(each.answer for each in requests), return_exceptions=True)
    return [
        each.outputs["scores"].tolist()
        if isinstance(each, Answer)
        else each.outcome
        if isinstance(each, RequestError)
        else each
        for each in answers
    ]


def test_a_lone_request_does_not_wait(engine: Engine, model: Model) -> None:
    """It is answered in a few turns of the loop: no timer is involved."""

    async def ask() -> int:
        request = submit(engine, [1, 2])
        for turn in range(20):
            if request.answer.done():
                return turn
            await asyncio.sleep(0)
        raise AssertionError("a lone request waits")

    served(engine, ask)
    assert model.batches == [[1, 2]]


def test_the_observer_is_told_of_the_first_batch_of_each_version(
    engine: Engine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(
        engine._observer,
        "changed_version",
        lambda: told.append((model.version, len(model.batches))),
    )

    async def ask() -> None:
        for version in "112231":
            model.version = version
            await submit(engine, [1]).answer

    served(engine, ask)
    assert told == [("1", 0), ("2", 3), ("3", 5), ("1", 6)]


def test_many_requests_keep_their_own_answers(engine: Engine) -> None:
    generator = random.Random(0)

    async def one(number: int) -> None:
        for _ in range(generator.randrange(4)):
            await asyncio.sleep(0)
        numbers = [1000.0 * number + each for each in range(generator.randrange(1, 60))]
        request = submit(engine, numbers, within=generator.uniform(100, 200))
        answer = await request.answer
        assert answer.outputs["scores"].tolist() == [2 * each for each in numbers]
        assert answer.version == "1" and answer.queue_s >= 0

    async def ask() -> None:
        await asyncio.gather(*(one(number) for number in range(300)))
        assert not engine.waiting

    served(engine, ask)


def test_those_that_wait_share_a_batch_by_their_deadlines(engine: Engine, model: Model) -> None:
    async def ask() -> list[Any]:
        return await outcomes([submit(engine, [each], within=1000 - each) for each in range(30)])

    assert served(engine, ask) == [[2 * each] for each in range(30)]
    assert model.batches == [list(range(29, 9, -1)), list(range(9, -1, -1))]


def test_who_has_left_is_not_answered(engine: Engine, model: Model) -> None:
    async def ask() -> list[Any]:
        gone, stays = submit(engine, [1]), submit(engine, [2])
        gone.answer.cancel()
        return await outcomes([stays])

    assert served(engine, ask) == [[4]]
    assert model.batches == [[2]]


def test_who_leaves_between_two_parts_is_not_asked_again(engine: Engine, model: Model) -> None:
    async def ask() -> None:
        long = submit(engine, list(range(50)))
        model.before = lambda _: long.answer.cancel() and None
        await outcomes([long])
        model.before = lambda _: None
        await outcomes([submit(engine, [7])])

    served(engine, ask)
    assert model.batches == [list(range(20)), [7]]


def refuse(culprit: float) -> Callable[[list[float]], None]:
    def before(numbers: list[float]) -> None:
        if culprit in numbers:
            raise ZeroDivisionError("a request that breaks the model")

    return before


def test_only_the_culprit_of_a_failed_batch_fails(engine: Engine, model: Model) -> None:
    model.before = refuse(3)

    async def ask() -> list[Any]:
        requests = [submit(engine, [each]) for each in range(5)]
        found = await outcomes(requests)
        error = requests[3].answer.exception()
        assert "the model failed: ZeroDivisionError: a request that breaks" in str(error)
        return found

    assert served(engine, ask) == [[0], [2], [4], Outcome.FAILED, [8]]


def test_a_culprit_is_found_by_halves(engine: Engine, model: Model) -> None:
    """All others wait meanwhile."""
    model.before = refuse(11)

    async def ask() -> list[Any]:
        return await outcomes([submit(engine, [each]) for each in range(16)])

    found = served(engine, ask)
    assert [number for number, each in enumerate(found) if each is Outcome.FAILED] == [11]
    assert len(model.batches) == 9


def test_a_part_that_fails_ends_the_request(engine: Engine, model: Model) -> None:
    model.before = refuse(30)

    async def ask() -> list[Any]:
        return await outcomes([submit(engine, list(range(60))), submit(engine, [1])])

    assert served(engine, ask) == [Outcome.FAILED, [2]]
    assert not engine.waiting


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers(engine: Engine, number: float) -> None:
    async def ask() -> list[Any]:
        wrong = submit(engine, [1, number])
        found = await outcomes([wrong, submit(engine, [2])])
        assert "version '1' returned NaN or infinite" in str(wrong.answer.exception())
        return found

    assert served(engine, ask) == [Outcome.FAILED, [4]]


def test_a_drained_model(engine: Engine, model: Model) -> None:
    def before(_: list[float]) -> None:
        raise DrainedError("version '2' is being made")

    model.before = before

    async def ask() -> list[Any]:
        return await outcomes([submit(engine, [1]), submit(engine, list(range(50)))])

    assert served(engine, ask) == [Outcome.DRAINED, Outcome.DRAINED]
    engine.drained_for = "2"
    with pytest.raises(RequestError, match="2") as raised:
        engine.check(1, 0, time.monotonic() + 100)
    assert raised.value.outcome is Outcome.DRAINED


def test_all_parts_are_of_one_version(engine: Engine, model: Model) -> None:
    def before(numbers: list[float]) -> None:
        if 30 in numbers:
            model.version = "2"

    model.before = before

    async def ask() -> Answer:
        return await submit(engine, list(range(50))).answer

    answer = served(engine, ask)
    assert answer.version == "2"
    assert answer.outputs["scores"].tolist() == [2 * each for each in range(50)]
    parts = [list(range(20)), list(range(20, 40))]
    assert model.batches == [*parts, *parts, list(range(40, 50))]


def test_the_last_part_may_be_the_one_of_another_version(engine: Engine, model: Model) -> None:
    def before(numbers: list[float]) -> None:
        if 49 in numbers:
            model.version = "2"

    model.before = before

    async def ask() -> Answer:
        return await submit(engine, list(range(50))).answer

    answer = served(engine, ask)
    assert answer.version == "2" and len(answer.outputs["scores"]) == 50
    assert len(model.batches) == 6


def test_what_became_hopeless_is_not_run(engine: Engine, model: Model) -> None:
    async def ask() -> list[Any]:
        return await outcomes([submit(engine, [1], within=0.0005), submit(engine, [2])])

    assert served(engine, ask) == [Outcome.EXPIRED, [4]]
    assert model.batches == [[2]]


def test_admission(engine: Engine) -> None:
    now = time.monotonic()
    engine.check(100, 0, now + 60)
    for samples, within, says in ((10, 0.001, "late by"), (1, -1.0, "it has 0.0 ms")):
        with pytest.raises(RequestError, match=says) as raised:
            engine.check(samples, 0, now + within)
        assert raised.value.outcome is Outcome.REFUSED
        assert raised.value.retry_s is None  # alone it would be late again
    assert engine.deadline(5.0, None) == 25.0
    assert engine.deadline(5.0, 1000) == 5.001
    assert engine.deadline(5.0, -(2**63)) < 0


def test_a_refusal_beside_others_may_be_tried_again(engine: Engine) -> None:
    async def ask() -> None:
        submit(engine, [1], within=60)
        with pytest.raises(RequestError, match="1 requests wait") as raised:
            engine.check(10, 0, time.monotonic() + 0.001)
        assert raised.value.retry_s is not None and raised.value.retry_s > 0

    asyncio.run(ask())


def test_a_queue_has_an_end(engine: Engine) -> None:
    async def ask() -> None:
        for number in range(1024):
            engine.check(1, 0, time.monotonic() + 1e6)
            submit(engine, [number], within=1e6)
        with pytest.raises(RequestError, match="1024 requests wait") as raised:
            engine.check(1, 0, time.monotonic() + 1e6)
        assert raised.value.outcome is Outcome.REFUSED

    asyncio.run(ask())


def test_a_correction_does_not_refuse_for_ever(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all requests are refused, no batch would show that the machine is fast again."""
    engine = engine_of(model, monkeypatch)
    predictor = engine._predictor

    async def ask() -> None:
        await submit(engine, [1]).answer
        predictor.stretch = 1e6
        with pytest.raises(RequestError, match="late"):
            engine.check(1, 0, time.monotonic() + 1)
        assert predictor.stretch == 1e6
        engine._last_batch -= 2  # seconds pass
        engine.check(1, 0, time.monotonic() + 1)
        assert predictor.stretch == 1

    served(engine, ask)


class Unforeseen(Exception):
    """An error that the engine knows nothing of."""


def test_an_error_of_the_loop_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unforeseen

    monkeypatch.setattr(engine._observer, "batch", fail)

    async def ask() -> None:
        work = asyncio.create_task(engine.run())
        requests = [submit(engine, list(range(40))), submit(engine, [1]), submit(engine, [2])]
        found = await asyncio.wait_for(outcomes(requests), DEADLINE)
        assert found == [Outcome.FAILED] * 3
        with pytest.raises(Unforeseen):
            await work
        with pytest.raises(RequestError, match="the service has ended"):
            engine.check(1, 0, time.monotonic() + 100)

    asyncio.run(ask())


def test_arrivals_are_dated_back_to_when_nobody_looked(engine: Engine, model: Model) -> None:
    """A request that is found after a batch may have come when the batch began."""
    seen: list[float] = []
    began: list[float] = []

    def before(_: list[float]) -> None:
        began.append(time.monotonic())
        asyncio.get_running_loop().call_soon(lambda: seen.append(engine.arrivals.earliest()))
        time.sleep(0.01)

    model.before = before

    async def ask() -> None:
        await submit(engine, [1]).answer
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append(engine.arrivals.earliest())

    served(engine, ask)
    assert seen[0] <= began[0] < seen[1] - 0.01


def test_many_refusals_make_batches_short_until_they_are_few(engine: Engine) -> None:
    for number in range(100):
        engine.decided(is_refused=number % 10 == 0)
    assert engine._waiting.is_overloaded
    for _ in range(200):
        engine.decided(is_refused=False)
    assert not engine._waiting.is_overloaded


def test_answers_do_not_change_with_later_batches(engine: Engine, model: Model) -> None:
    async def ask() -> list[Answer]:
        return [await submit(engine, [each, each + 1]).answer for each in range(3)]

    answers = served(engine, ask)
    assert [each.outputs["scores"].tolist() for each in answers] == [[0, 2], [2, 4], [4, 6]]
    assert all(np.isfinite(each.queue_s) for each in answers)
