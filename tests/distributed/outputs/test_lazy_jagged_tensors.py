import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_bls.distributed.outputs.lazy_jagged_tensors import CutEmbeddings, LazyJaggedTensor

DIM = 3
LENGTHS = torch.tensor([2, 0, 1, 1, 3, 0])
COUNTS = [2, 2, 3]
# The rows of features 2 and 0, as a sharding's output dist has them.
ORDER = [2, 0]


def lazy() -> dict[str, JaggedTensor]:
    rows = torch.arange(5.0 * DIM).view(5, DIM)
    cut = CutEmbeddings(rows, LENGTHS.view(3, 2), ORDER, COUNTS)
    return {"c": LazyJaggedTensor.at(cut, 0), "a": LazyJaggedTensor.at(cut, 1)}


def plain() -> dict[str, JaggedTensor]:
    rows = torch.arange(5.0 * DIM).view(5, DIM)
    return {
        "c": JaggedTensor(rows[:3], lengths=LENGTHS[4:]),
        "a": JaggedTensor(rows[3:], lengths=LENGTHS[:2]),
    }


def assert_same(found: dict[str, JaggedTensor]) -> None:
    expected = plain()
    assert list(found) == list(expected)
    for name, each in found.items():
        assert torch.equal(each.values(), expected[name].values())
        assert torch.equal(each.lengths(), expected[name].lengths())
        assert torch.equal(each.offsets(), expected[name].offsets())
        assert each.weights_or_none() is None
        assert type(each) is JaggedTensor


@pytest.mark.parametrize(
    "use",
    [
        lambda embeddings: embeddings,
        copy.deepcopy,
        lambda embeddings: {name: copy.copy(each) for name, each in embeddings.items()},
        lambda embeddings: pickle.loads(pickle.dumps(embeddings)),
        lambda embeddings: tree_map(lambda t: t if t is None else t.clone(), embeddings),
        lambda embeddings: {
            name: each.to(torch.device("cpu")) for name, each in embeddings.items()
        },
    ],
    ids=["as it is", "deepcopy", "copy", "pickle", "tree_map", "to"],
)
def test_first_uses(
    use: Callable[[dict[str, JaggedTensor]], dict[str, JaggedTensor]],
) -> None:
    assert_same(use(lazy()))


def test_every_method_that_asks_first() -> None:
    for name in ("values", "lengths", "offsets", "to_dense", "weights_or_none", "size_in_bytes"):
        found, expected = (getattr(each["c"], name)() for each in (lazy(), plain()))
        assert str(found) == str(expected), name


def test_what_a_jagged_tensor_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'vales'"):
        lazy()["a"].vales  # noqa: B018


def test_threads_that_use_one_at_once() -> None:
    for _ in range(200):
        embeddings = lazy()
        ready = threading.Barrier(2)
        found: list[torch.Tensor] = []

        def use(
            each: JaggedTensor = embeddings["a"],
            ready: threading.Barrier = ready,
            found: list[torch.Tensor] = found,
        ) -> None:
            ready.wait(30)
            found.append(each.values())

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2 and torch.equal(*found)
