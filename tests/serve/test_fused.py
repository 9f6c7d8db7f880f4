"""TorchRec's DLRM in fewer steps answers the same."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch

from torchrec_bls import attach, keeper
from torchrec_bls.serve.compiled import dense_parts
from torchrec_bls.serve.fused import DotProducts, Stacked, fuse_if_faster

ROWS, COLUMNS, DENSE, KEYS = 50, 16, 3, ["a", "b", "c", "d"]
# Products are added in another order: scores below 1 of some dozen float32 additions each differ by
# some of their last bits, 6e-8 each.
ROUNDING = 1e-6
FASTER, SLOWER = ([(1, 1, each)] for each in (0.5, 2.0))


def dlrm(device: str = "cpu") -> DLRM:
    tables = [
        EmbeddingBagConfig(
            name=f"t{key}", feature_names=[key], num_embeddings=ROWS, embedding_dim=COLUMNS
        )
        for key in KEYS
    ]
    torch.manual_seed(1)
    bags = EmbeddingBagCollection(tables=tables, device=torch.device(device))
    return DLRM(bags, DENSE, [8, COLUMNS], [8, 1]).eval()


def asked(samples: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    lengths = torch.randint(0, 4, (len(KEYS) * samples,))
    ids = torch.randint(ROWS, (int(lengths.sum()),))
    return torch.rand(samples, DENSE), KeyedJaggedTensor(KEYS, ids, lengths=lengths)


def fused(model: nn.Module, after: list[tuple[int, int, float]] = FASTER) -> str:
    """Fuses a model whose batches take a second before, and other times afterwards."""
    times = iter([[(1, 1, 1.0)], [(1, 1, 1.0)], after])
    return fuse_if_faster(model, lambda: next(times))


@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(1, 70),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32),
)
def test_dot_products(samples: int, features: int, columns: int, scale: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    dense = scale * torch.randn(samples, columns, generator=random)
    sparse = scale * torch.randn(samples, features, columns, generator=random)
    plain = InteractionArch(features)
    with torch.no_grad():
        found = DotProducts(plain)(dense_features=dense, sparse_features=sparse)
    expected = plain(dense.double(), sparse.double())
    assert found.shape == expected.shape
    # Products and sums are rounded: by so much of the sum of their sizes.
    sizes = plain(dense.double().abs(), sparse.double().abs())
    assert ((found - expected).abs() <= 1e-7 * columns * sizes).all()


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        (torch.rand(3, 4).double(), torch.rand(3, 2, 4).double()),
        (torch.rand(4, 3).T, torch.rand(3, 2, 4)),
        (torch.rand(3, 4), torch.rand(2, 3, 4).transpose(0, 1)),
    ],
    ids=["of another dtype", "dense features in another order", "embeddings in another order"],
)
@torch.no_grad()
def test_what_native_code_can_not_read(dense: torch.Tensor, sparse: torch.Tensor) -> None:
    plain = InteractionArch(2)
    assert torch.equal(DotProducts(plain)(dense, sparse), plain(dense, sparse))


@torch.no_grad()
def test_features_that_do_not_belong_together() -> None:
    with pytest.raises(RuntimeError):
        DotProducts(InteractionArch(2))(torch.rand(2, 4), torch.rand(4, 1, 4))


def test_gradients_are_those_of_the_plain_module() -> None:
    dense, sparse = torch.rand(3, 4, requires_grad=True), torch.rand(3, 2, 4)
    DotProducts(InteractionArch(2))(dense, sparse).sum().backward()
    assert dense.grad is not None


@torch.no_grad()
def test_a_model_answers_the_same() -> None:
    model, plain = dlrm(), dlrm()
    assert (
        fused(model) == "TorchRec's DLRM takes fewer steps, which makes batches 2.00 times as fast"
    )
    assert type(model.inter_arch) is DotProducts and type(model.sparse_arch) is Stacked
    for samples in (1, 2, 17):
        request = asked(samples)
        torch.testing.assert_close(model(*request), plain(*request), rtol=0.0, atol=ROUNDING)


@torch.no_grad()
def test_a_model_that_is_slower_so_is_left_as_it_is() -> None:
    model = dlrm()
    before = list(model.modules())
    assert "left as it is" in fused(model, SLOWER)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


@torch.no_grad()
def test_a_model_that_fails_so_is_left_as_it_is() -> None:
    model, request = dlrm(), asked(2)
    before, plain = list(model.modules()), model(*request)

    def measure() -> list[tuple[int, int, float]]:
        if type(model.inter_arch) is DotProducts:
            raise ZeroDivisionError("not so")
        return FASTER

    assert "left as it is: in fewer steps, ZeroDivisionError: not so" in fuse_if_faster(
        model, measure
    )
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert torch.equal(model(*request), plain)


def test_other_models_are_not_measured() -> None:
    class Other(InteractionArch):
        pass

    assert fuse_if_faster(nn.Sequential(Other(3), nn.Linear(2, 2)), lambda: 1 / 0) == ""


def test_modules_that_do_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dlrm()
    model.inter_arch.register_forward_hook(lambda *_: None)
    monkeypatch.setattr(model.sparse_arch, "forward", lambda features: features)
    before = list(model.modules())
    assert fused(model) == ""
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


@torch.no_grad()
def test_embeddings_in_another_order_are_put_in_order() -> None:
    class Turned(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
            by_name = plain.embedding_bag_collection(features).to_dict()
            names = KEYS[::-1]
            values = torch.cat([by_name[name] for name in names], dim=1)
            return KeyedTensor(names, [COLUMNS] * len(KEYS), values)

    plain: SparseArch = dlrm().sparse_arch
    stacked = Stacked(plain)
    _, ids = asked(5)
    assert torch.equal(stacked(ids), plain(ids))
    stacked.embedding_bag_collection = Turned()
    assert torch.equal(stacked(ids), plain(ids))


@pytest.mark.full
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float", "INT8"])
@torch.no_grad()
def test_a_model_that_reads_tables_of_others(tmp_path: Path, is_quantized: bool) -> None:
    def made(model: nn.Module) -> nn.Module:
        return quantize_inference_model(model) if is_quantized else model

    weights = dlrm().state_dict()
    with keeper(lambda: made(dlrm("meta")), weights, tmp_path / "tables"):
        model, plain = made(dlrm("meta")), made(dlrm())
        attach(model, tmp_path / "tables")
        assert fused(model)
        # What native code does is not compiled.
        parts = dense_parts(model)
        assert parts and not any(isinstance(each, (DotProducts, Stacked)) for each in parts)
        for samples in (1, 30):
            request = asked(samples)
            torch.testing.assert_close(model(*request), plain(*request), rtol=0.0, atol=ROUNDING)
