"""A version that does not pass its probe is not announced, and the old one serves on."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct.nodes import DEADLINE, FLOAT
from tests.processes import run
from torchrec_bls import Keeper, keeper, publish, serving_state
from torchrec_bls.direct.serving.served_model import ServedModel

QUANTIZED = "tests.quant.served"


@pytest.fixture(params=[FLOAT, QUANTIZED])
def served(request: pytest.FixtureRequest) -> Any:
    return import_module(request.param)


@pytest.fixture
def kept(served: Any, tmp_path: Path) -> Iterator[Keeper]:
    with keeper(served.bare_model, served.weights_of(1), tmp_path / "k", version="1") as made:
        yield made


def test_a_probe_sees_the_new_version_alone(served: Any, kept: Keeper) -> None:
    """Tables and dense weights are those of the version, and nothing of the model is touched."""
    batches = served.batches_of(0)
    expected = served.Expected(batches)
    model = kept.model
    with torch.no_grad():
        model(batches[0])
    before = replace(serving_state(model), age=None)
    seen = []

    def probe(twin: Any) -> None:
        assert twin is not model and type(twin) is type(model)
        for number, batch in enumerate(batches):
            output, theirs = twin(batch), expected.of(2, number)
            assert all(torch.equal(output[name], each) for name, each in theirs.items())
        with pytest.raises(ValueError, match="KeyedJaggedTensor"):
            twin("no batch")
        seen.append(replace(serving_state(model), age=None))
        assert served.check(model, batches, expected, 1) == 1

    kept.publish(served.weights_of(2), probe=probe, version="2")
    assert seen == [before]  # rows read, refused batches, version, what is announced
    assert served.check(model, batches, expected, 1) == 2
    # The model of a process that is probed again and again keeps nothing of it.
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    kept.publish(served.weights_of(3), probe=lambda twin: None, version="3")
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    assert served.check(model, batches, expected, 1) == 3


def raise_key_error(twin: Any) -> None:
    raise KeyError("no such answer")


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (raise_key_error, "its probe does not pass: KeyError: 'no such answer'"),
        (lambda twin: False, "its probe does not pass: it returned False"),
        ([("batch", -1.0, 1.0)], r"request 0 of its probe .* at \[\d.*\] of the answer\['bags"),
        (
            [("batch", -1e9, 1e9), ("batch", 0.0, 1e9)],
            r"request 1 .* is not between 0.0 and 1e\+?0?9|1000000000",
        ),
        ([("no batch", 0, 1)], "request 0 of its probe does not pass: ValueError"),
    ],
)
def test_what_does_not_pass(served: Any, kept: Keeper, probe: Any, says: str) -> None:
    batch = served.batches_of(0)[0]
    if isinstance(probe, list):
        probe = [((batch,) if what == "batch" else (what,), *bounds) for what, *bounds in probe]
    with pytest.raises(ValueError, match=r"version '2' is not published, since .*" + says):
        kept.publish(served.weights_of(2), probe=probe, version="2")
    state = serving_state(kept.model)
    assert (kept.version, state.announced, state.pending) == ("1", "1", {})
    expected = served.Expected([batch])
    assert served.check(kept.model, [batch], expected, 0) == 1
    kept.publish(served.weights_of(2), probe=lambda twin: None, version="2")
    assert served.check(kept.model, [batch], expected, 0) == 2


def test_bounds_are_compared_with_all_numbers(served: Any, kept: Keeper) -> None:
    """The bounds that the answers themselves are hold; NaN never does."""
    batch = served.batches_of(0)[0]

    theirs = served.Expected([batch]).of(2, 0)
    low = min(float(each.min()) for each in theirs.values() if each.numel())
    high = max(float(each.max()) for each in theirs.values() if each.numel())
    kept.publish(served.weights_of(2), probe=[((batch,), low, high)], version="2")
    weights = served.weights_of(3)
    weights["dense.bias"][1] = float("nan")
    with pytest.raises(
        ValueError, match=r"nan at \[0, 1\] of the answer\['dense'\] is not between"
    ):
        kept.publish(weights, probe=[((batch,), -1e9, 1e9)], version="3")
    shape = theirs["dense"].shape
    bounds = torch.full(shape, -1e9), torch.full(shape, 1e9)
    with pytest.raises(ValueError, match="request 0 of its probe does not pass: RuntimeError"):
        kept.publish(weights, probe=[((batch,), *bounds)], version="3")  # other answers' shapes
    assert kept.version == "2"
    with torch.no_grad():
        assert torch.equal(kept.model(batch)["dense"], theirs["dense"])


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ([], "must be a function of the model, or a list of requests"),
        ("abc", "request 0 of the probe is a str, but must be the arguments"),
        ([(1, 2, 3)], "request 0 of the probe is a tuple, but must be"),
        ([((), 1)], "request 0 of the probe is a tuple, but must be"),
    ],
)
def test_what_is_no_probe(kept: Keeper, served: Any, probe: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kept.publish(served.weights_of(2), probe=probe, version="2")


def probe_a_sharded_model(rank: int, name: str) -> None:
    served = import_module(name)
    model, batches = served.sharded(), served.batches_of(rank)
    expected = served.Expected(batches)
    assert served.check(model, batches, expected, 0) == 1

    def probe(twin: Any) -> None:
        output, theirs = twin(batches[1]), expected.of(2, 1)
        assert all(torch.equal(output[name], each) for name, each in theirs.items())

    new = served.weights_of(2)
    with pytest.raises(ValueError, match="can't be given up if they do not pass a probe"):
        publish(model, probe=lambda model: None, version="2")
    with pytest.raises(ValueError, match="its probe does not pass: AssertionError"):
        publish(model, served.weights_of(3), probe=probe, version="3", deadline=DEADLINE)
    assert served.check(model, batches, expected, 1) == 1
    publish(model, new, probe=probe, version="2", deadline=DEADLINE).wait(DEADLINE)
    assert served.check(model, batches, expected, 1) == 2
    assert ServedModel.of(model).state().version == "2"


@pytest.mark.parametrize("name", [FLOAT, QUANTIZED])
def test_a_sharded_model_of_one_rank(name: str) -> None:
    run(1, probe_a_sharded_model, name)


def refuse_a_part(rank: int) -> None:
    served: Any = import_module(QUANTIZED)
    model, batches = served.sharded(), served.batches_of(rank)
    with torch.no_grad():
        model(batches[0])
    with pytest.raises(ValueError, match="2 ranks publish parts of this one"):
        publish(model, served.weights_of(2), probe=lambda twin: None, version="2")
    with pytest.raises(ValueError, match=r"attach\(owner=[01]\), and publish there"):
        publish(model, served.weights_of(2), probe=lambda t: None, version="2", owner=1 - rank)


def test_a_probe_needs_all_tables() -> None:
    run(2, refuse_a_part)
