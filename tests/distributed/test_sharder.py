"""The sharders take their arguments as TorchRec's do, and refuse what cannot work by name."""

from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv

from tests.distributed.models import EBC, EC, SGD
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

SHARDERS = [BLSEmbeddingCollectionSharder, BLSEmbeddingBagCollectionSharder]
CONFIG = BLSConfig(bound=2)
UNNAMED = {"bounds_check_mode": BoundsCheckMode.NONE}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BLSEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder),
        (BLSEmbeddingCollectionSharder, EmbeddingCollectionSharder),
        (BLSQuantEmbeddingBagCollectionSharder, QuantEmbeddingBagCollectionSharder),
        (BLSQuantEmbeddingCollectionSharder, QuantEmbeddingCollectionSharder),
    ],
)
def test_what_comes_by_its_place_is_torchrecs(ours: type, theirs: type) -> None:
    """Each of ours by its place is TorchRec's at this place, with its default; the rest has
    names."""
    mine, original = (
        [(each.name, each.default, each.kind) for each in signature(kind).parameters.values()]
        for kind in (ours, theirs)
    )
    by_place = [each for each in mine if each[2] is Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place == original[: len(by_place)]
    assert {each[2] for each in mine[len(by_place) :]} == {Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((SGD,), {"config": CONFIG}),
        ((SGD, None), {"config": CONFIG}),
        ((SGD, {}), {"config": CONFIG}),
        ((), {"config": CONFIG, "fused_params": SGD}),
    ],
)
@pytest.mark.parametrize("sharder", SHARDERS)
def test_arguments_are_given_as_to_torchrec(
    sharder: type, positional: tuple[Any, ...], named: dict[str, Any]
) -> None:
    made: Any = sharder(*positional, **named)
    assert made._config is CONFIG
    assert made.fused_params == UNNAMED | SGD


@pytest.mark.parametrize(
    ("positional", "named", "message"),
    [
        ((2,), {}, "fused_params are 2, but must be a dict"),
        ((), {"config": SGD}, "config is .*learning_rate.*, but must be a BLSConfig"),
        ((), {"fused_params": CONFIG}, r"fused_params are BLSConfig\(.*, but must be a dict"),
        ((CONFIG,), {"config": CONFIG}, "config is given twice"),
        ((CONFIG, CONFIG), {}, "config is given twice"),
    ],
)
@pytest.mark.parametrize("sharder", SHARDERS)
def test_arguments_of_other_types_are_refused(
    sharder: type, positional: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"^{sharder.__name__}: .*{message}"):
        sharder(*positional, **named)


@pytest.mark.parametrize("kind", [EC, EBC], ids=lambda kind: kind.name)
def test_devices_without_host_memory_are_refused(kind: Any) -> None:
    sharder = kind.bls_sharder(CONFIG)
    with pytest.raises(ValueError, match=r"on the device 'meta'.*device=torch.device\('cpu'\)"):
        sharder.shard(kind.module(), {}, None, torch.device("meta"))


@pytest.mark.parametrize("kind", [EC, EBC], ids=lambda kind: kind.name)
def test_environments_without_a_process_group_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"from_local.*ShardingEnv\.from_process_group\("):
        kind.bls_sharder(CONFIG).shard(kind.module(), {}, ShardingEnv.from_local(2, 0))


def test_a_dense_kernel_where_none_is_possible_names_the_fused_one() -> None:
    sharder = EC.bls_sharder(CONFIG)
    plan = construct_module_sharding_plan(
        EC.module(),
        {f"t{table}": row_wise() for table in range(EC.tables)},
        sharder=sharder,
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    env: Any = ShardingEnv.from_local(2, 0)
    env.process_group = object()  # refused before anybody asks it for anything
    message = (
        "table 't0' is planned with compute kernel dense, but only fused are possible with "
        "row_wise, since FBGEMM's dense kernel.*"
        r'table_wise\(rank=0, compute_kernel="fused"\)'
    )
    with pytest.raises(ValueError, match=message):
        sharder.shard(EC.module(), plan, env)


def test_planners_may_choose_what_every_table_can_have() -> None:
    """A grid is refused for mean pooling, of which a planner does not know."""
    ours = BLSEmbeddingBagCollectionSharder().sharding_types("cpu")
    assert ours == [
        "table_wise",
        "row_wise",
        "column_wise",
        "table_row_wise",
        "table_column_wise",
        "data_parallel",
    ]
    assert BLSEmbeddingCollectionSharder().sharding_types("cpu") == ours[:3]
    direct = BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct"))
    assert direct.sharding_types("cpu") == [each for each in ours if each != "data_parallel"]
    auto = BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="auto"))
    assert auto.sharding_types("cpu") == ours
