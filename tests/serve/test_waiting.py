"""Requests wait by their deadlines, and admission foresees what batches will do."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchrec_bls.serve import waiting as module
from torchrec_bls.serve.inputs import Features
from torchrec_bls.serve.predictor import Costs, Predictor
from torchrec_bls.serve.waiting import Answer, Part, Request, Waiting, joined, longest_batch

MARGIN = 0.0005
MOST_SAMPLES = 40
COSTS = Costs(0.0005, 0.0001, 0.0)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    yield made
    asyncio.set_event_loop(None)
    made.close()


@pytest.fixture(scope="module", autouse=True)
def longest() -> Iterator[None]:
    """A batch may take 2 ms here, which the figures below are computed with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONGEST_BATCH", 0.002)
        patch.setattr(module, "LONGEST_TURN", 0.001)
        yield


class Asking(NamedTuple):
    """What is known of a request when it comes."""

    samples: int
    ids: int
    deadline: float


def request_of(asking: Asking) -> Request:
    features = Features(
        asking.samples,
        None,
        np.zeros(asking.ids, dtype=np.int64),
        np.zeros(0, dtype=np.int32),
        None,
        np.array([asking.ids]),
        (False,),
    )
    return Request(features, asking.deadline, 0.0, asyncio.get_event_loop().create_future())


def predictor_of(costs: Costs) -> Predictor:
    made = Predictor([(1, 1, 0.001)])
    made.costs = costs
    return made


def waiting_of(costs: Costs, asked: list[Asking], is_overloaded: bool = False) -> Waiting:
    made = Waiting(predictor_of(costs), MOST_SAMPLES)
    made.is_overloaded = is_overloaded
    for each in asked:
        made.add(request_of(each))
    return made


class Batch(NamedTuple):
    parts: list[Part]
    begin: float
    end: float


def simulated(waiting: Waiting, costs: Costs, now: float) -> list[Batch]:
    """Runs all batches, each as long as predicted, and does what the engine does."""
    batches = []
    while len(waiting):
        parts = waiting.next_batch(now)
        samples = sum(each.end - each.first for each in parts)
        ids = sum(
            each.request.features.ids * (each.end - each.first) / each.request.features.samples
            for each in parts
        )
        end = now + costs.batch + costs.sample * samples + costs.id * ids
        batches.append(Batch(parts, now, end))
        for each in parts:
            each.request.done = each.end
            each.request.answered.append(Answer({}, "1", samples, 0.0))
        now = end
        assert len(batches) < 10_000
    return batches


milliseconds = st.integers(0, 30_000).map(lambda each: each / 1e6)
all_costs = st.builds(
    Costs,
    milliseconds.map(lambda each: each / 3),
    st.sampled_from([0.0, 1e-6, 7e-6, 31e-6, 110e-6, 0.004]),
    st.sampled_from([0.0, 0.1e-6, 1.3e-6]),
)
askings = st.builds(Asking, st.integers(1, MOST_SAMPLES), st.integers(0, 300), milliseconds)


@settings(max_examples=500)
@given(all_costs, st.lists(askings, max_size=8), askings, st.booleans())
def test_a_forecast_is_what_the_batches_will_show(
    costs: Costs, asked: list[Asking], new: Asking, is_overloaded: bool
) -> None:
    foreseen = waiting_of(costs, asked, is_overloaded).forecast(*new, now=0.0)
    waiting = waiting_of(costs, asked, is_overloaded)
    its_own = request_of(new)
    waiting.add(its_own)
    order = sorted([*asked, new], key=lambda each: each.deadline)
    place = max(number for number, each in enumerate(order) if each.deadline == new.deadline)
    behind = {id(each) for each in waiting._requests[place:]}
    assert id(its_own) in behind
    late, slack, ends = 0.0, math.inf, {}
    for batch in simulated(waiting, costs, 0.0):
        for part in batch.parts:
            ends[id(part.request)] = batch.end
            if id(part.request) in behind:
                late = max(late, batch.end - (part.request.deadline - MARGIN))
                if part.end == part.request.features.samples:
                    slack = min(slack, part.request.deadline - MARGIN - batch.end)
    # Sums in another order differ in their last bits, and then a batch may take one more.
    assume(not 0 < abs(late) < 1e-9)
    assert (foreseen.late_s > 0) == (late > 0), (foreseen, late)
    if not late:
        # Those with later deadlines may still join its batch, as long as it is in time.
        assert foreseen.slack_s >= slack - 1e-9
        if place == len(asked):
            assert foreseen.slack_s == pytest.approx(slack, abs=1e-9)
        assert foreseen.end == pytest.approx(ends[id(its_own)], abs=1e-9)


def copy_of(waiting: Waiting) -> Waiting:
    """Returns one that knows nothing but the requests and the costs."""
    made = Waiting(waiting._predictor, MOST_SAMPLES)
    made.is_overloaded = waiting.is_overloaded
    made._requests = list(waiting._requests)
    return made


steps = st.lists(
    st.one_of(
        askings,
        st.sampled_from(["next batch", "discard", "forget", "hopeless", "overload", "all"]),
        all_costs,
    ),
    max_size=20,
)


@settings(max_examples=300)
@given(all_costs, steps, askings)
def test_a_forecast_does_not_depend_on_those_before_it(
    costs: Costs, steps: list[Asking | str | Costs], new: Asking
) -> None:
    waiting = waiting_of(costs, [])
    for step in steps:
        if isinstance(step, Asking):
            waiting.add(request_of(step))
        elif isinstance(step, Costs):
            waiting._predictor.costs = step
        elif step == "next batch":
            for part in waiting.next_batch(0.0):
                part.request.done = part.end
        elif step == "discard" and waiting._requests:
            waiting.discard(waiting._requests[len(waiting) // 2])
        elif step == "forget" and waiting._requests:
            waiting._requests[-1].answer.cancel()
            waiting.forget_answered()
        elif step == "hopeless":
            waiting.hopeless(0.001)
        elif step == "overload":
            waiting.is_overloaded = not waiting.is_overloaded
        elif step == "all":
            waiting.take_all()
        alone = copy_of(waiting)
        assert waiting.forecast(*new, now=0.0) == alone.forecast(*new, now=0.0)
        assert waiting.rest_s(0.0) == copy_of(waiting).rest_s(0.0)


def test_a_later_forecast_is_as_much_later() -> None:
    waiting = waiting_of(COSTS, [Asking(15, 0, 5.0)] * 3)
    at_first = waiting.forecast(15, 0, 5.0, 0.0)
    assert waiting.forecast(15, 0, 5.0, 0.25) == pytest.approx(
        (at_first.end + 0.25, at_first.slack_s - 0.25, 0)
    )
    assert waiting.forecast(15, 0, 0.3, 0.25).end == pytest.approx(0.25 + 0.002)
    assert waiting.rest_s(0.25) == pytest.approx(0.006)


@given(all_costs, st.lists(askings, min_size=1, max_size=8), st.booleans())
def test_all_are_answered_once_in_the_order_of_deadlines(
    costs: Costs, asked: list[Asking], is_overloaded: bool
) -> None:
    waiting = waiting_of(costs, asked, is_overloaded)
    longest = longest_batch(costs.batch, 1.0, is_overloaded)
    everyone = {id(each): each for each in waiting._requests}
    batches = simulated(waiting, costs, 0.0)
    parts = [each for batch in batches for each in batch.parts]
    deadlines = [each.request.deadline for each in parts]
    assert deadlines == sorted(deadlines)
    seen = dict.fromkeys(everyone, 0)
    for each in parts:
        assert each.first == seen[id(each.request)] < each.end
        seen[id(each.request)] = each.end
    assert seen == {key: each.features.samples for key, each in everyone.items()}
    for batch in batches:
        samples = sum(each.end - each.first for each in batch.parts)
        assert samples <= MOST_SAMPLES
        if samples > 1 and len(batch.parts) == 1:  # a part of one
            assert batch.end - batch.begin <= longest + 1e-9
        if len(batch.parts) > 1:
            assert batch.end - batch.begin <= longest + 1e-9
            assert batch.end <= batch.parts[0].request.deadline - MARGIN + 1e-9


def test_equal_deadlines_go_in_the_order_of_their_arrival() -> None:
    waiting = waiting_of(COSTS, [Asking(1, 0, 5.0), Asking(2, 0, 5.0), Asking(3, 0, 5.0)])
    assert [each.request.samples for each in waiting.next_batch(0.0)] == [1, 2, 3]


def test_others_go_between_the_parts_of_a_long_one() -> None:
    waiting = waiting_of(COSTS, [Asking(20, 0, 5.0)])
    [first] = waiting.next_batch(0.0)
    assert (first.first, first.end) == (0, 15)
    first.request.done = first.end
    waiting.add(request_of(Asking(1, 0, 1.0)))
    urgent, rest = waiting.next_batch(0.0)
    assert urgent.request.deadline == 1.0
    assert (rest.request, rest.first, rest.end) == (first.request, 15, 20)
    assert not len(waiting)


def test_costs_of_every_batch_that_are_high_do_not_cut_requests_to_samples() -> None:
    """Then a batch of one sample would cost as much as one of many."""
    waiting = waiting_of(Costs(0.01, 0.001, 0.0), [Asking(30, 0, 5.0)])
    [first] = waiting.next_batch(0.0)
    assert first.end == 10


def test_costs_of_a_batch_alone() -> None:
    costs = Costs(0.005, 0.0, 0.0)
    assert waiting_of(costs, []).forecast(30, 100, 0.02, 0.0).late_s == 0
    assert waiting_of(costs, []).forecast(30, 100, 0.0052, 0.0).late_s == pytest.approx(0.0003)
    [part] = waiting_of(costs, [Asking(30, 100, 1.0)]).next_batch(0.0)
    assert part.end == 30


def test_a_long_queue_tells_how_late() -> None:
    waiting = waiting_of(COSTS, [Asking(15, 0, 0.007)] * 3)
    assert waiting.forecast(1, 0, 0.02, 0.0) == (
        pytest.approx(0.0066),
        pytest.approx(0.0129),
        0,
    )
    assert waiting.forecast(1, 0, 0.007, 0.0).late_s == pytest.approx(0.0001)
    # One with the earliest deadline would delay the three.
    assert waiting.forecast(15, 0, 0.005, 0.0).late_s == pytest.approx(0.0015)
    assert waiting.rest_s(0.0) == pytest.approx(0.0060)


def test_what_comes_beside_the_model_and_a_margin_count_for_the_forecast() -> None:
    waiting = waiting_of(COSTS, [Asking(15, 0, 0.01)])
    waiting._predictor.stretch, waiting._predictor.margin_s = 2.0, 0.003
    assert waiting.forecast(15, 0, 0.011, 0.0) == pytest.approx((0.008, 0.0025, 0.0005))
    # The model alone decides how much fits a batch.
    assert waiting.next_batch(0.0)[0].end == 15


def test_in_overload_batches_are_short_and_the_margin_is_safe() -> None:
    """Refusals are to be prompt then, and there are others to answer."""
    waiting = waiting_of(COSTS, [Asking(20, 0, 5.0)], is_overloaded=True)
    waiting._predictor.margin_s, waiting._predictor.safe_margin_s = 0.0, 0.003
    assert waiting.forecast(15, 0, 0.0063, 0.0) == pytest.approx((0.003, 0.0028, 0.0002))
    assert waiting.next_batch(0.0)[0].end == 5
    waiting.is_overloaded = False
    assert waiting.forecast(15, 0, 0.0063, 0.0) == pytest.approx((0.002, 0.0038, 0))


def test_a_batch_is_shorter_the_longer_refusals_take() -> None:
    """What lasts is the time from one batch to the next, in which nobody new is refused."""
    waiting = waiting_of(COSTS, [Asking(20, 0, 5.0)], is_overloaded=True)
    waiting._predictor.stretch = 1.25
    assert waiting.next_batch(0.0)[0].end == 5  # of 1 ms, of which half is the cost of any batch
    waiting._predictor.stretch = 0.625
    assert waiting.next_batch(0.0)[0].end == 11
    waiting.is_overloaded = False
    assert waiting.next_batch(0.0)[0].end == 15


def test_a_margin_takes_half_of_a_request_s_time_at_most() -> None:
    """A machine that stood still for long is no reason to refuse who finds nobody waiting."""
    waiting = waiting_of(COSTS, [])
    waiting._predictor.margin_s = 10.0
    assert waiting.forecast(15, 0, 0.0051, 0.0).late_s == 0
    assert waiting.forecast(15, 0, 0.0049, 0.0).late_s > 0
    # Behind others there is half of its time for all.
    behind = waiting_of(COSTS, [Asking(15, 0, 0.02)] * 5)
    behind._predictor.margin_s = 10.0
    assert behind.forecast(15, 0, 0.02, 0.0).late_s == pytest.approx(0.0025)


def test_an_empty_request_costs_a_sample() -> None:
    waiting = waiting_of(COSTS, [Asking(20, 0, 5.0)])
    assert waiting.forecast(0, 0, 0.001, 0.0) == waiting.forecast(1, 0, 0.001, 0.0)


def test_what_is_hopeless_leaves() -> None:
    waiting = waiting_of(COSTS, [Asking(5, 0, 0.0006), Asking(1, 0, 0.00065), Asking(1, 0, 0.1)])
    assert [each.deadline for each in waiting.hopeless(0.0)] == [0.0006]
    assert [each.deadline for each in waiting.hopeless(0.0001)] == [0.00065]
    assert not waiting.hopeless(0.0001) and len(waiting) == 1


def test_what_has_begun_is_not_hopeless() -> None:
    """A late answer is worth more than none, after most of it was computed."""
    waiting = waiting_of(COSTS, [Asking(20, 0, 0.01)])
    [part] = waiting.next_batch(0.0)
    part.request.done = part.end
    part.request.answered.append(Answer({}, "1", 15, 0.0))
    assert not waiting.hopeless(1.0)
    assert waiting.next_batch(1.0)[0].end == 20


def test_who_has_left_is_forgotten() -> None:
    waiting = waiting_of(COSTS, [Asking(1, 0, 1.0), Asking(1, 0, 2.0), Asking(1, 0, 3.0)])
    gone, discarded, kept = waiting._requests
    gone.answer.cancel()
    waiting.forget_answered()
    waiting.discard(discarded)
    waiting.discard(discarded)
    assert waiting.take_all() == [kept] and not len(waiting)


def test_parts_are_joined() -> None:
    def answer(values: list[float], **changes: Any) -> Answer:
        return Answer({"scores": np.array(values)}, "7", 3, 0.1)._replace(**changes)

    whole = joined([answer([1, 2]), answer([3], batch=5, queue_s=0.9)])
    assert whole.outputs["scores"].tolist() == [1, 2, 3]
    assert (whole.version, whole.batch, whole.queue_s) == ("7", 5, 0.1)
