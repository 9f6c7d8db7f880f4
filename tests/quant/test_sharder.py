"""The quantized sharders take their arguments as TorchRec's do, and refuse what has no effect."""

from typing import Any

import pytest
import torch
from torchrec.distributed.fused_params import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.types import ShardingEnv

from tests.distributed.models import Batch, assert_same_bits, flatten
from tests.processes import run
from tests.quant import models
from torchrec_bls import (
    BLSConfig,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

SHARDERS = [BLSQuantEmbeddingBagCollectionSharder, BLSQuantEmbeddingCollectionSharder]
TYPES = ["int8"] * 4
OF_THE_MODULE = {
    FUSED_PARAM_REGISTER_TBE_BOOL: True,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: False,
    "output_dtype": torch.float32,
}


@pytest.mark.parametrize("sharder", SHARDERS)
def test_shardable_params_choose_the_tables_of_planners(sharder: Any) -> None:
    kind = "ebc" if sharder is BLSQuantEmbeddingBagCollectionSharder else "ec"
    module = models.model_of(kind, TYPES).embeddings
    assert len(sharder().shardable_parameters(module)) == 4
    assert sharder(shardable_params=["other"]).shardable_parameters(module) == {}
    made = sharder(fused_params=OF_THE_MODULE)
    assert made.fused_params == OF_THE_MODULE


@pytest.mark.parametrize("sharder", SHARDERS)
@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            {"config": {"output_dtype": 1}},
            r"config is {'output_dtype': 1}, but must be a BLSConfig",
        ),
        ({"fused_params": [1]}, r"fused_params are \[1\], but must be a dict"),
    ],
)
def test_arguments_of_other_types_are_refused(
    sharder: Any, named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"^{sharder.__name__}: {message}"):
        sharder(**named)


@pytest.mark.parametrize("sharder", SHARDERS)
@pytest.mark.parametrize(
    "env", [ShardingEnv.from_local(2, 0), {"cpu": ShardingEnv.from_local(2, 0)}]
)
def test_environments_without_a_process_group_are_refused(sharder: Any, env: Any) -> None:
    kind = "ebc" if sharder is BLSQuantEmbeddingBagCollectionSharder else "ec"
    with pytest.raises(ValueError, match=r"from_local.*ShardingEnv\.from_process_group\("):
        sharder().shard(models.model_of(kind, TYPES).embeddings, {}, env)


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({FUSED_PARAM_REGISTER_TBE_BOOL: False}, "quantized with True: give both the same"),
        ({"bounds_check_mode": 1}, "'bounds_check_mode': 1, but lookups stay as the module"),
    ],
)
def test_fused_params_without_effect_are_refused(fused_params: Any, message: str) -> None:
    sharder = BLSQuantEmbeddingBagCollectionSharder(fused_params=fused_params)
    env: Any = ShardingEnv.from_local(2, 0)
    env.process_group = object()  # refused before anybody asks it for anything
    with pytest.raises(ValueError, match=message):
        sharder.shard(models.model_of("ebc", TYPES).embeddings, {}, env)


def look_up(rank: int) -> None:
    unsharded = models.model_of("ebc", TYPES)
    sharder = BLSQuantEmbeddingBagCollectionSharder(
        config=BLSConfig(lookup="exchange"), fused_params=OF_THE_MODULE
    )
    model = models.shard(models.model_of("ebc", TYPES), sharder, "row_wise")
    batch = Batch(models.make_ids("ebc", rank, 5))
    with torch.no_grad():
        assert_same_bits(flatten(model(batch)), flatten(unsharded(batch)))


def test_fused_params_that_the_module_has_change_nothing() -> None:
    run(2, look_up)
