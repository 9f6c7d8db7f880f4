"""A batch of requests gives each sample what it gets alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.serve.comparing import check
from tests.serve.models import Bags, Rows, with_weights
from tests.serve.samples import KEYS, Asked, inputs_of, requests
from torchrec_bls.serve.batches import dense_of, ids_of, outputs_of


def several(is_weighted: bool = False, may_broadcast: bool = True) -> Any:
    return st.lists(requests(is_weighted, may_broadcast), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def bags() -> nn.Module:
    return with_weights(Bags(mean=True))


@pytest.fixture(scope="module")
def weighted() -> nn.Module:
    return with_weights(Bags(is_weighted=True))


@pytest.fixture(scope="module")
def rows() -> nn.Module:
    return with_weights(Rows())


@given(asked=several(), data=st.data())
def test_bags(bags: nn.Module, asked: list[Asked], data: st.DataObject) -> None:
    check(bags, bags, inputs_of(), asked, data)


@given(asked=several(is_weighted=True), data=st.data())
def test_weighted_bags(weighted: nn.Module, asked: list[Asked], data: st.DataObject) -> None:
    check(weighted, weighted, inputs_of(is_weighted=True), asked, data)


# TorchRec's own EmbeddingCollection does not repeat the rows of a batch with a size per key.
@given(asked=several(may_broadcast=False), data=st.data())
def test_rows(rows: nn.Module, asked: list[Asked], data: st.DataObject) -> None:
    check(rows, rows, inputs_of(), asked, data)


@given(asked=requests())
def test_a_batch_is_in_memory_of_its_own(asked: Asked) -> None:
    """A batch must not write to a caller's message, nor lie at any byte."""
    features = asked.features(inputs_of())
    before = [None if each is None else each.copy() for each in (features.values, features.dense)]
    ids, dense = ids_of([features], KEYS), dense_of([features])
    for tensor in (ids.values(), ids.lengths(), dense):
        assert tensor.data_ptr() % tensor.element_size() == 0
        tensor.fill_(-1)
    for array, then in zip((features.values, features.dense), before, strict=True):
        assert np.array_equal(array, then)  # type: ignore[arg-type]


def test_outputs() -> None:
    column = torch.arange(3.0)
    memory = column.clone()
    outputs = outputs_of(memory, 3)
    memory.zero_()
    assert outputs["scores"].tolist() == [0, 1, 2]
    assert outputs_of((column, column.double()), 3).keys() == {"output_0", "output_1"}
    assert outputs_of({"a": column.to(torch.bfloat16)}, 3)["a"].dtype == np.float32


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.zeros(2), r"a Tensor \[2\] as 'scores' for 3 samples"),
        (torch.tensor(1.0), r"a Tensor \[\] as 'scores'"),
        ({"a": 1.0}, "a float .* as 'a'"),
        ([torch.zeros(3), None], "a NoneType .* as 'output_1'"),
        (None, "a NoneType .* as 'scores'"),
    ],
)
def test_outputs_that_do_not_fit(returned: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        outputs_of(returned, 3)
