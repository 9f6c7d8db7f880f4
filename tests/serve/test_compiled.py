"""The dense part of a model is compiled where that is faster, and answers the same."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchrec_bls import attach, keeper
from torchrec_bls.serve import compiled, demo
from torchrec_bls.serve.compiled import FOLDER, compile_if_faster, dense_parts
from torchrec_bls.serve.inputs import Features
from torchrec_bls.serve.model_calls import Measured, ModelCalls, made_up

pytestmark = pytest.mark.full

ROWS = np.array(list(demo.FEATURES.values()))


def request(samples: int) -> Features:
    return made_up(samples, 2, ROWS, demo.DENSE_FEATURES, False, seed=samples)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def checkpoint(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    torch.save(demo.Ranker("cpu").state_dict(), path)
    return path


def answers_of(path: Path, requests: Sequence[Features]) -> list[np.ndarray]:
    plain = demo.Ranker("cpu").eval()
    plain.load_state_dict(torch.load(path))
    calls = ModelCalls.__new__(ModelCalls)
    calls.model, calls._keys, calls._is_weighted = plain, list(demo.FEATURES), False
    calls.seconds = 0.0
    return [calls.answered([each])["scores"] for each in requests]


def test_answers_stay_the_same_in_this_version_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "ENOUGH", 0.0)  # however fast it is
    first, second = (checkpoint(tmp_path / f"{each}.pt", each) for each in (1, 2))
    with keeper(demo.build, first, tmp_path / "tables") as kept:
        model = demo.build().eval()
        attach(model, tmp_path / "tables")
        calls = ModelCalls(model, list(demo.FEATURES), demo.DENSE_FEATURES)

        def measure() -> Measured:
            for samples in (1, 8):
                calls.answered([request(samples)])
            return [(1, 2, 1.0)]

        names = set(model.state_dict())
        _, text = compile_if_faster(model, measure, str(first))
        assert "is compiled" in text
        assert set(model.state_dict()) == names
        # Sizes that it was not compiled for as well.
        requests = [request(samples) for samples in (1, 2, 8, 100)]
        for path in (first, second):
            if path is second:
                kept.publish(second)
                calls.answered([request(1)])
                state = torch.load(second)
                assert torch.equal(
                    dict(model.named_parameters())["layers.0.weight"], state["layers.0.weight"]
                )
            for got, expected in zip(
                [calls.answered([each])["scores"] for each in requests],
                answers_of(path, requests),
                strict=True,
            ):
                np.testing.assert_allclose(got, expected, atol=1e-6)


class Tables(nn.Module):
    """Stands for a model with a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = compiled.AttachedCollection.__new__(compiled.AttachedCollection)
        nn.Module.__init__(self.tables)
        self.arch = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(1, 1)), "wide": nn.Linear(1, 1)})


def is_compiled(model: nn.Module) -> list[bool]:
    return [each._compiled_call_impl is not None for each in dense_parts(model)]


def times(*seconds: float) -> Measured:
    return [(1, number, each) for number, each in enumerate(seconds)]


def test_dense_parts_are_as_large_as_can_be() -> None:
    model = Tables()
    assert dense_parts(model) == [model.arch]


@pytest.mark.parametrize(
    "after, says, stays",
    [((1.0, 1.8), "makes batches 1.05 times as fast", True), ((1.0, 2.0), "left as it is", False)],
)
def test_it_has_to_be_faster(
    after: tuple[float, ...], says: str, stays: bool, tmp_path: Path
) -> None:
    measured = iter([times(7.0, 7.0), times(1.0, 2.0), times(9.0, 9.0), times(*after)])
    model = Tables()
    found, text = compile_if_faster(model, lambda: next(measured), str(tmp_path / "w"))
    assert says in text
    assert is_compiled(model) == [stays]
    assert found == times(*(after if stays else (1.0, 2.0)))


def test_what_can_not_be_compiled_stays(tmp_path: Path) -> None:
    calls = []

    def measure() -> Measured:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no such operation")
        return times(1.0)

    model = Tables()
    found, text = compile_if_faster(model, measure, str(tmp_path / "w"))
    assert text.endswith("RuntimeError: no such operation")
    assert is_compiled(model) == [False] and found == times(1.0)


def test_a_compiler_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = Tables()
    _, text = compile_if_faster(model, lambda: times(1.0), str(tmp_path / "w"))
    assert "no compiler no-such-compiler" in text and is_compiled(model) == [False]


def test_code_is_kept_beside_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_if_faster(Tables(), lambda: times(1.0), str(tmp_path / "step-1"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / FOLDER)
