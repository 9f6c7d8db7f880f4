"""Batches of requests in tables that a keeper holds, float and quantized, pooled and by row."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec import KeyedJaggedTensor

from tests.serve.comparing import check
from tests.serve.models import Bags, Mixed, Rows, Scores, quantized, with_weights
from tests.serve.samples import DENSE_COLUMNS, FEATURES, KEYS, Asked, inputs_of, requests
from torchrec_bls import keeper
from torchrec_bls.direct.serving.reading_modules import reading_modules
from torchrec_bls.quant import stored_reads
from torchrec_bls.serve import model_calls
from torchrec_bls.serve.model_calls import ModelCalls, made_up, measured
from torchrec_bls.serve.probe import FiniteAnswers

pytestmark = pytest.mark.full


class Attached(NamedTuple):
    """A model that reads tables of a keeper, and TorchRec's own with the same weights."""

    model: nn.Module
    reference: nn.Module
    is_weighted: bool = False


def attached(folder: Path, kind: Any, is_quantized: bool, **options: bool) -> Iterator[Attached]:
    def build() -> nn.Module:
        model = kind("meta", **options)
        return quantized(model) if is_quantized else model

    weights = with_weights(kind("cpu", **options))
    with keeper(build, weights.state_dict(), folder / "tables", version="1") as kept:
        reference = quantized(weights) if is_quantized else weights
        ModelCalls(kept.model, KEYS, DENSE_COLUMNS)  # passes weights only to those who take them
        yield Attached(kept.model, reference, options.get("is_weighted", False))


def name_of(param: tuple[type, bool]) -> str:
    return f"{param[0].__name__} {'INT8' if param[1] else 'float'}"


@pytest.fixture(
    scope="module", params=[(Bags, False), (Rows, False), (Bags, True), (Rows, True)], ids=name_of
)
def of_ids(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attached]:
    yield from attached(tmp_path_factory.mktemp("tables"), *request.param)


@pytest.fixture(scope="module", params=[(Bags, False), (Bags, True), (Mixed, False)], ids=name_of)
def of_weights(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attached]:
    folder = tmp_path_factory.mktemp("tables")
    yield from attached(folder, *request.param, is_weighted=True)


several = st.lists(requests(), min_size=1, max_size=4)
several_weighted = st.lists(requests(is_weighted=True), min_size=1, max_size=4)


@settings(max_examples=60)
@given(asked=several, data=st.data())
def test_batches(of_ids: Attached, asked: list[Asked], data: st.DataObject) -> None:
    check(of_ids.model, of_ids.reference, inputs_of(), asked, data)


@settings(max_examples=60)
@given(asked=several_weighted, data=st.data())
def test_weighted_batches(of_weights: Attached, asked: list[Asked], data: st.DataObject) -> None:
    inputs = inputs_of(is_weighted=True)
    check(of_weights.model, of_weights.reference, inputs, asked, data)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_what_is_broadcast_is_looked_up_once(
    tmp_path: Path, is_quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's 9 ids, and not 9 for each of 50 candidates."""
    looked_up: list[int] = []

    def counted(module: Any, features: KeyedJaggedTensor, check: Any) -> Any:
        looked_up.append(features.values().numel())
        return original(module, features, check)

    original = stored_reads.looked_up
    monkeypatch.setattr(stored_reads, "looked_up", counted)
    rows = np.array([each.rows for each in FEATURES])
    made = made_up(50, 1, rows, DENSE_COLUMNS, False)
    shared = made_up(1, 9, rows, 0, False)
    request = replace(
        made,
        values=np.concatenate([shared.values[:9], made.values[50:]]),
        lengths=np.concatenate([shared.lengths[:1], made.lengths[50:]]),
        counts=np.array([9, 50, 50]),
        broadcast=(True, False, False),
    )
    for served in attached(tmp_path, Bags, is_quantized):
        ModelCalls(served.model, KEYS, DENSE_COLUMNS).answered([request])
        [reader] = reading_modules(served.model).values()
        if is_quantized:
            assert looked_up == [109]
        else:  # the user is looked up in two tables
            assert int(reader.direct_reads.rows_read.sum()) == 118


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_number_of_dense_features_is_found(tmp_path: Path, is_weighted: bool) -> None:
    """And a model whose ids have weights is asked with weights, then and later."""
    for served in attached(tmp_path, Scores, False, is_weighted=is_weighted):
        calls = ModelCalls(served.model, KEYS, None)
        assert calls.dense_columns == DENSE_COLUMNS
        sizes = [each[:2] for each in measured(calls, inputs_of(is_weighted))]
        assert sizes == [(1, 3), (1, 12)]  # of those below the most samples
        FiniteAnswers(FEATURES, is_weighted, None)(served.model)
        with torch.no_grad():
            served.model.layer.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match=r"nan at \[0\] of 'scores' \(64 of 64 are no finite"):
            FiniteAnswers(FEATURES, is_weighted, DENSE_COLUMNS)(served.model)


def test_dense_features_that_cannot_be_found(tmp_path: Path) -> None:
    for served in attached(tmp_path, Scores, False):
        served.model.layer.in_features = 5
        with pytest.raises(ValueError, match=r"none of \[5\].*give it as dense_features"):
            ModelCalls(served.model, KEYS, None)


class Three(nn.Module):
    def forward(self, dense: Any, ids: Any, third: Any, fourth: Any = None) -> Any: ...


class One(nn.Module):
    def forward(self, ids: Any, *, other: Any = None) -> Any:
        return ids.lengths().view(len(KEYS), -1).sum(0)


def test_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_calls, "reading_modules", lambda model: {})
    with pytest.raises(ValueError, match="forward of Three takes 3 arguments"):
        ModelCalls(Three(), KEYS, None)
    calls = ModelCalls(One(), KEYS, None)
    assert calls.dense_columns == 0
    rows = np.array([each.rows for each in FEATURES])
    made = made_up(2, 4, rows, 0, False)
    assert calls.answered([made, made])["scores"].tolist() == [12] * 4
    assert (made.values.reshape(3, 8) < rows[:, None]).all() and made.values.min() >= 0
