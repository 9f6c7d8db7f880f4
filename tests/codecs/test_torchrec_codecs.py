"""The codecs in TorchRec's own sharded modules, over gloo."""

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls.codecs.rows import Codec, round_trip
from torchrec_bls.codecs.torchrec_codecs import RowCodec, codecs_registry

ROW = 4  # divides the columns of all shards


def sharder_with(kind: models.Kind, forward: Codec, backward: Codec) -> Any:
    plain = kind.torchrec_sharder()
    return type(plain)(
        fused_params=plain.fused_params,
        qcomm_codecs_registry=codecs_registry(forward, backward, ROW),
    )


def values_of(output: Any) -> torch.Tensor:
    """All embeddings of an output, flat."""
    return torch.cat(
        [
            values.reshape(-1)
            for name, values in models.flatten(output).items()
            if "lengths" not in name
        ]
    )


def forward_is_rounded(rank: int, kind: models.Kind, sharding: str) -> None:
    batch = models.Batch(models.make_ids(kind, rank, samples=5))
    with torch.no_grad():
        exact = values_of(models.shard(kind, sharding, kind.torchrec_sharder())(batch))
        for codec in (Codec.UINT8, Codec.UINT4, Codec.UINT2, Codec.BF16, Codec.FP32):
            model = models.shard(kind, sharding, sharder_with(kind, codec, Codec.FP32))
            found = values_of(model(batch))
            expected = round_trip(exact.reshape(-1, ROW), codec).view(exact.shape)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    slow_but(
        [(models.EBC, "column_wise"), (models.EC, "row_wise")],
        [
            (models.EBC, "table_wise"),
            (models.EBC, "column_wise"),
            (models.EC, "table_wise"),
            (models.EC, "row_wise"),
        ],
    ),
)
def test_embeddings_arrive_rounded_by_row(kind: models.Kind, sharding: str) -> None:
    run(2, forward_is_rounded, kind, sharding)


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, KeyedTensor):
        values: torch.Tensor = output.values()
    else:
        values = torch.cat([jagged.values() for jagged in output.values()])
    return values.square().sum()


def train_with(
    rank: int, kind: models.Kind, sharding: str, forward: Codec, backward: Codec
) -> list[torch.Tensor]:
    model = models.shard(kind, sharding, sharder_with(kind, forward, backward))
    for step in range(3):
        ids = models.make_ids(kind, 10 * step + rank, samples=5)
        loss_of(models.arrived(model(models.Batch(ids)))).backward()
    with torch.no_grad():
        return [values_of(model(models.Batch(models.make_ids(kind, rank, samples=5))))]


@pytest.mark.parametrize(
    ("kind", "sharding"),
    slow_but(
        [(models.EBC, "table_wise")],
        [(models.EBC, "table_wise"), (models.EC, "table_wise"), (models.EC, "row_wise")],
    ),
)
def test_gradients_travel_encoded(kind: models.Kind, sharding: str) -> None:
    def trained(backward: Codec) -> torch.Tensor:
        outputs = run(2, train_with, kind, sharding, Codec.FP32, backward)
        return torch.cat([values for (values,) in outputs])

    exact, close, coarse = map(trained, (Codec.FP32, Codec.UINT8, Codec.UINT2))
    near, far = (close - exact).norm() / exact.norm(), (coarse - exact).norm() / exact.norm()
    assert 0 < near < 0.01 < far


@pytest.mark.parametrize("codec", Codec)
def test_sizes_are_known_before(codec: Codec) -> None:
    adapter = RowCodec(codec, 12)
    values = torch.randn(7, 24)
    values[2, 3] = torch.nan
    data = adapter.encode(values)
    assert data.numel() == adapter.calc_quantized_size(values.numel())
    back = adapter.decode(data).view(14, 12)
    assert back[4].isnan().any()
    assert back[[row for row in range(14) if row != 4]].isfinite().all()


def test_row_dims_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="row_dim is 0"):
        RowCodec(Codec.UINT8, 0)
    with pytest.raises(ValueError, match="12 values are no whole rows of 8"):
        RowCodec(Codec.UINT8, 8).calc_quantized_size(12)
