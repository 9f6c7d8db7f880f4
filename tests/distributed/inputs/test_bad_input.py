"""What does not fit is refused with a message that says what, where and what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import set_ec_index_dedup
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
    bounded_lag_modules,
)
from torchrec_bls.errors import BatchRefusedError, RendezvousError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
SHARDERS = [BLSEmbeddingCollectionSharder, BLSEmbeddingBagCollectionSharder]


def sharded(kind: models.Kind, **config: Any) -> DistributedModelParallel:
    return models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(deadline=20, **config)))


def good_ids(kind: models.Kind = models.EBC) -> KeyedJaggedTensor:
    return models.make_ids(kind, 0, 4)


def with_id(value: int) -> KeyedJaggedTensor:
    ids = models.make_ids(models.EBC, 0, 4)
    ids.values()[ids.offset_per_key()[2] + 1] = value  # the second id of f2
    return ids


def ids_with(**changes: Any) -> KeyedJaggedTensor:
    ids = good_ids()
    parts = {"keys": ids.keys(), "values": ids.values(), "lengths": ids.lengths()} | changes
    return KeyedJaggedTensor(**parts)


def too_long() -> KeyedJaggedTensor:
    lengths = good_ids().lengths().clone()
    lengths[-1] += 1
    return ids_with(lengths=lengths)


def negative() -> KeyedJaggedTensor:
    lengths = good_ids().lengths().clone()
    lengths[0] -= 5
    lengths[1] += 5
    return ids_with(lengths=lengths)


def of_keys(*keys: str) -> KeyedJaggedTensor:
    one = torch.ones(len(keys), dtype=torch.int32)
    return KeyedJaggedTensor(list(keys), torch.zeros(len(keys), dtype=torch.int64), lengths=one)


def per_key(
    rows: int | None = 0, names: list[str] = models.FEATURES, lengths: int = 9
) -> KeyedJaggedTensor:
    """A batch size per key, and three samples that have row `rows` of all keys."""
    inverse = None if rows is None else (names, torch.full((len(names), 3), rows))
    return KeyedJaggedTensor(
        models.FEATURES,
        torch.zeros(lengths, dtype=torch.int64),
        lengths=torch.ones(lengths, dtype=torch.int32),
        stride_per_key_per_rank=[[1], [2], [1], [2], [3]],
        inverse_indices=inverse,
    )


# Each gives the input of rank 1 and what its error says.
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "id too large": (
        lambda: with_id(57),
        r"id 57 at position 1 of feature 'f2' is out of range: its table has 57 rows, so ids go "
        r"from 0 to 56",
    ),
    "id negative": (
        lambda: with_id(-1),
        r"id -1 at position 1 of feature 'f2' is out of range: its table has 57 rows",
    ),
    "keys missing": (
        lambda: of_keys("f0", "f2", "f3"),
        r"the KeyedJaggedTensor lacks the features \['f1', 'f4'\] of the module",
    ),
    "keys misspelt": (
        lambda: of_keys("f0", "F1", "f2", "f3", "f4"),
        r"lacks the features \['f1'\] of the module and has keys that the module does not have: "
        r"\['F1'\]",
    ),
    "lengths too long": (too_long, r"malformed KeyedJaggedTensor: .*lengths"),
    "length negative": (negative, r"malformed KeyedJaggedTensor: .*negative"),
    "batch size per key alone": (
        lambda: per_key(None),
        "a batch size per key and no inverse_indices, which say the row of each sample",
    ),
    "no such row of a key": (
        lambda: per_key(1),
        "inverse_indices of key 'f0' are from 1 to 1, but it has 1 rows",
    ),
    "a negative row": (lambda: per_key(-1), "inverse_indices of key 'f0' are from -1 to -1"),
    "no rows of a key": (
        lambda: per_key(0, models.FEATURES[:4]),
        r"inverse_indices are given for \['f0', 'f1', 'f2', 'f3'\], but not for key 'f4'",
    ),
    "batch sizes that are not those of the lengths": (
        lambda: per_key(0, lengths=8),
        r"input has 8 lengths, but its batch sizes per key are \[1, 2, 1, 2, 3\]",
    ),
    "no KeyedJaggedTensor": (
        lambda: torch.zeros(3),
        "input is a Tensor, not a KeyedJaggedTensor",
    ),
}


def give_bad_input(rank: int, case: str, warm: bool, kind: models.Kind = models.EBC) -> None:
    make_bad, message = BAD[case]
    with torch.no_grad():
        expected = models.flatten(sharded(kind)(models.Batch(good_ids(kind))))
        ours = sharded(kind)
        if warm:
            models.arrived(ours(models.Batch(good_ids(kind))))
        for bad_rank in (1, 0, 1):
            if rank == bad_rank:
                with pytest.raises(ValueError, match=f"^embeddings on rank {rank}: .*{message}"):
                    models.arrived(ours(models.Batch(make_bad())))
            else:
                models.assert_same_bits(
                    models.flatten(ours(models.Batch(good_ids(kind)))), expected
                )
        models.assert_same_bits(models.flatten(ours(models.Batch(good_ids(kind)))), expected)


# An id, what is in the tensors, a batch size per key, and no tensors at all.
KEPT = ["id too large", "lengths too long", "no such row of a key", "no KeyedJaggedTensor"]


@pytest.mark.parametrize("case", slow_but(KEPT, BAD))
def test_bad_input_is_refused_and_the_other_ranks_get_their_rows(case: str) -> None:
    run(3, give_bad_input, case, True)


@pytest.mark.parametrize("case", slow_but(["keys missing"], [KEPT[0], "keys missing", KEPT[-1]]))
def test_bad_input_in_the_first_batch(case: str) -> None:
    run(3, give_bad_input, case, False)


class Towers(nn.Module):
    """Uses the embeddings of each module before it calls the next."""

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = first, second, third

    def forward(self, batches: dict[str, KeyedJaggedTensor]) -> dict[str, torch.Tensor]:
        sums = {}
        for name in ("second", "first", "third"):
            sums[name] = models.flatten(getattr(self, name)(batches[name]))
        return {f"{name} {key}": t for name, flat in sums.items() for key, t in flat.items()}


def give_bad_input_to_towers(rank: int, lookup: str) -> None:
    kinds = {"first": models.EBC, "second": models.EC, "third": models.WEIGHTED}
    modules = [kind.module() for kind in kinds.values()]
    plans = {
        name: models.make_plan(module, ["table_wise"] * kind.tables, kind.bls_sharder(BLSConfig()))
        for (name, kind), module in zip(kinds.items(), modules, strict=True)
    }
    config = BLSConfig(deadline=30, lookup=lookup)
    model = models.shard_model(
        Towers(*modules), plans, [models.EBC.bls_sharder(config), models.EC.bls_sharder(config)]
    )
    good = {name: good_ids(kind) for name, kind in kinds.items()}
    with torch.no_grad():
        expected = None
        for bad_name in ("second", "first", "third", "first", None):
            bad = {**good, bad_name: torch.zeros(1)}
            if rank == 1 and bad_name is not None:
                with pytest.raises(ValueError, match=f"^{bad_name} on rank 1: input is a Tensor"):
                    model(bad)
                continue
            output = model(good)
            expected = expected or output
            models.assert_same_bits(output, expected)


@pytest.mark.parametrize("lookup", ["exchange", "direct"])
def test_modules_that_the_failed_forward_did_not_call_answer_the_other_ranks(lookup: str) -> None:
    """In the first batch they choose their lookups: read directly, too, that takes all ranks."""
    run(3, give_bad_input_to_towers, lookup)


def give_bad_input_in_training(rank: int, case: str, kind_name: str) -> None:
    kind = KINDS[kind_name]
    make_bad, message = BAD[case]
    ours, theirs = sharded(kind), models.shard(kind, "mixed", kind.torchrec_sharder())
    for step in range(5):
        ids = models.make_ids(kind, 10 * step + rank, 4)
        if step in (0, 3):
            # All ranks leave the step out.
            if rank == 1:
                with pytest.raises(ValueError, match=f"^embeddings on rank 1: .*{message}"):
                    models.arrived(ours(models.Batch(make_bad())))
            else:
                with pytest.raises(
                    BatchRefusedError,
                    match=rf"on rank {rank}: rank 1 refused its batch, .*embeddings on rank 1: .*"
                    + message,
                ):
                    models.arrived(ours(models.Batch(ids)))
            continue
        outputs = [step_of(model, ids) for model in (ours, theirs)]
        models.assert_same_bits(*outputs)


def step_of(model: DistributedModelParallel, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """Returns the output of a step of training whose loss is the sum of all embeddings."""
    output = models.arrived(model(models.Batch(ids)))
    tensors = (
        [output.values()]
        if isinstance(output, KeyedTensor)
        else [j.values() for j in output.values()]
    )
    sum(tensor.sum() for tensor in tensors).backward()
    return models.flatten(output)


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
@pytest.mark.parametrize("case", [KEPT[0], KEPT[-1]])
def test_bad_input_in_training_is_refused_by_all_and_the_next_step_is_right(
    case: str, kind: str
) -> None:
    run(2, give_bad_input_in_training, case, kind)


def give_bad_ids_to_each_kind(rank: int) -> None:
    for kind in KINDS.values():
        model = sharded(kind)
        ids = good_ids(kind)
        ids.values()[0] = 41  # f0 has 41 rows in its own table and 64 in the other
        with torch.no_grad(), pytest.raises(ValueError, match=r"id 41 .*'f0' .* has 41 rows"):
            models.arrived(model(models.Batch(ids)))


def test_a_feature_of_several_tables_has_the_ids_of_the_smallest() -> None:
    run(1, give_bad_ids_to_each_kind)


def look_row_0_up(rank: int, kind_name: str) -> None:
    kind = KINDS[kind_name]
    model = sharded(kind, bad_ids="row0")
    ids = models.make_ids(kind, rank, 6)
    with torch.no_grad():
        models.assert_same_bits(
            models.flatten(model(models.Batch(ids))),
            models.flatten(sharded(kind)(models.Batch(ids))),
        )
        values = ids.values()
        values[0], values[-1], values[3] = -1, 10**12, 41
        zeroed = values.clone()
        zeroed[0] = zeroed[-1] = 0
        zeroed[3] = 0 if ids.offset_per_key()[1] > 3 else 41
        wanted = KeyedJaggedTensor(ids.keys(), zeroed, ids.weights_or_none(), ids.lengths())
        with pytest.warns(UserWarning, match="looked up as row 0"):
            output = models.flatten(model(models.Batch(ids)))
        models.assert_same_bits(output, models.flatten(sharded(kind)(models.Batch(wanted))))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            models.assert_same_bits(models.flatten(model(models.Batch(ids))), output)
        (module,) = bounded_lag_modules(model).values()
        assert module.replaced_ids == 2 * int((zeroed != values).sum()) > 0
        assert values[-1] == 10**12  # the caller's ids are left as they are


@pytest.mark.parametrize("kind", slow_but(["ebc"], KINDS))
def test_row_0_stands_for_ids_without_rows_if_wanted(kind: str) -> None:
    run(2, look_row_0_up, kind)


def give_ids_at_the_edges(rank: int) -> None:
    ids = good_ids()
    for feature, rows in enumerate([41, 50, 57, 64, 71]):
        first, end = ids.offset_per_key()[feature : feature + 2]
        ids.values()[first], ids.values()[end - 1] = 0, rows - 1
    ours, theirs = (
        sharded(models.EBC),
        models.shard(models.EBC, "mixed", models.EBC.torchrec_sharder()),
    )
    with torch.no_grad():
        models.assert_same_bits(
            models.flatten(ours(models.Batch(ids))), models.flatten(theirs(models.Batch(ids)))
        )


def test_the_first_and_the_last_id_are_in_range() -> None:
    run(2, give_ids_at_the_edges)


def change_the_keys(rank: int) -> None:
    model = sharded(models.EBC)
    with torch.no_grad():
        models.arrived(model(models.Batch(good_ids())))
        with pytest.raises(
            ValueError,
            match=r"the keys are \['f4', .*\], but those of the first batch were \['f0', .*: keep "
            "keys and their order the same in all batches",
        ):
            models.arrived(model(models.Batch(of_keys(*reversed(models.FEATURES)))))


def test_keys_may_not_change_their_order() -> None:
    run(2, change_the_keys)


def add_unknown_keys(rank: int, kind_name: str) -> None:
    kind = KINDS[kind_name]
    ids = models.make_ids(kind, rank, 4)
    more = KeyedJaggedTensor.concat([ids_of_a_stranger(ids), ids])
    ours, theirs = sharded(kind), models.shard(kind, "mixed", kind.torchrec_sharder())
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"which are ignored: \['stranger'\]"):
            output = models.flatten(ours(models.Batch(more)))
        models.assert_same_bits(output, models.flatten(theirs(models.Batch(ids))))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            models.assert_same_bits(models.flatten(ours(models.Batch(more))), output)


def ids_of_a_stranger(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = None if ids.weights_or_none() is None else torch.ones(ids.stride())
    lengths = torch.ones(ids.stride(), dtype=torch.int32)
    huge = torch.full((ids.stride(),), 10**9)
    return KeyedJaggedTensor(["stranger"], huge, weights, lengths)


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_unknown_keys_are_ignored_with_a_warning(kind: str) -> None:
    run(2, add_unknown_keys, kind)


def plan_with(kind: models.Kind, sharding_type: str, kernel: str) -> None:
    module, sharder = kind.module(), kind.bls_sharder(BLSConfig())
    plan = models.make_plan(module, ["table_wise"] * kind.tables, sharder)
    plan["t2"].sharding_type, plan["t2"].compute_kernel = sharding_type, kernel
    models.shard_model(module, {"": plan}, [sharder])


def plan_badly(rank: int) -> None:
    for kind, sharding_type, kernel, message in (
        (
            models.EC,
            "table_row_wise",
            "fused",
            "sharding type table_row_wise, but only table_wise, row_w",
        ),
        (
            models.EC,
            "table_column_wise",
            "fused",
            ".*since TorchRec has it for EmbeddingBagCollections",
        ),
        (
            models.EC,
            "grid_shard",
            "fused",
            ".*since TorchRec has it for EmbeddingBagCollections alone",
        ),
        (
            models.EC,
            "data_parallel",
            "dense",
            ".*since FBGEMM's dense kernel, .* mishandles unpooled",
        ),
        (
            models.EC,
            "table_wise",
            "dense",
            "compute kernel dense, but only fused are possible with table",
        ),
        (
            models.EBC,
            "data_parallel",
            "fused",
            "compute kernel fused, .*updates of its own rank alone",
        ),
        (models.EBC, "table_wise", "fused_uvm", "compute kernel fused_uvm, but only fused"),
    ):
        sharder = "BLSEmbeddingCollection" if kind is models.EC else "BLSEmbeddingBagCollection"
        with pytest.raises(
            ValueError, match=f"^{sharder}Sharder: table 't2' is planned with {message}"
        ):
            plan_with(kind, sharding_type, kernel)


def test_plans_with_unsupported_sharding_types_or_kernels_name_the_table() -> None:
    run(2, plan_badly)


@pytest.mark.parametrize("sharder", SHARDERS)
def test_codecs_are_refused(sharder: type) -> None:
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=f"{sharder.__name__} takes no qcomm_codecs_registry: write"
    ):
        sharder(None, registry)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound": -1}, "bound is -1, but must be a number of iterations from 0"),
        ({"bound": 1.5}, "bound is 1.5, but must be a number of iterations"),
        ({"bound": True}, "bound is True, but must be a number of iterations"),
        ({"transport": "rdma"}, "transport is 'rdma', but has to be one of auto"),
        ({"slot_bytes": 8}, "slot_bytes is 8, but a message header alone may take"),
        ({"expected_batch": 0}, "expected_batch is 0, but must be positive"),
        ({"bad_ids": "ignore"}, "bad_ids is 'ignore', but must be one of refuse, row0"),
        ({"deadline": 0}, "deadline is 0 s, but must be positive"),
        ({"deadline": float("nan")}, "deadline is nan s, but must be positive"),
        ({"deadline": float("inf")}, "deadline is inf s, but must be"),
    ],
)
def test_a_config_is_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLSConfig(**arguments)


def use_different_bounds(rank: int) -> None:
    model = sharded(models.EBC, bound=rank)
    with (
        torch.no_grad(),
        pytest.raises(
            RendezvousError,
            match=r"bound differs between ranks \(ranks \[0\]: 0; ranks \[1\]: 1\). Give every "
            "rank the same bound",
        ),
    ):
        model(models.Batch(good_ids()))


def test_ranks_need_one_bound() -> None:
    run(2, use_different_bounds)


def shard_differently(rank: int, changes: dict[str, Any], message: str) -> None:
    arguments = {"sharding": "mixed", "slot_bytes": None} | (changes if rank == 1 else {})
    config = BLSConfig(deadline=30, slot_bytes=arguments["slot_bytes"])
    model = models.shard(models.EBC, arguments["sharding"], models.EBC.bls_sharder(config))
    with torch.no_grad(), pytest.raises(RendezvousError, match=message):
        model(models.Batch(good_ids()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sharding": "row_wise"},
            r"table 0 differs between ranks \(ranks \[0, 2\]: 't0' of 41 x 8 FP32 for features "
            r"\['f0'\], table_wise on ranks \[0\] as 41x8; ranks \[1\]: .*, row_wise on ranks .* "
            r"as 14x8 14x8 13x8\). Shard the same model",
        ),
        ({"slot_bytes": 4096}, r"slot_bytes differs between ranks \(ranks \[0, 2\]: None; ranks "),
    ],
)
def test_ranks_need_one_plan(changes: dict[str, Any], message: str) -> None:
    run(3, shard_differently, changes, message)


def ask_for_dedup(rank: int) -> None:
    with pytest.raises(ValueError, match=r"use_index_dedup.*no kernel for the CPU"):
        BLSEmbeddingCollectionSharder(config=BLSConfig(), use_index_dedup=True)
    set_ec_index_dedup(True)
    with pytest.raises(ValueError, match=r"no kernel for the CPU.*set_ec_index_dedup\(False\)"):
        sharded(models.EC)


def test_deduplication_of_ids_is_refused_with_the_reason() -> None:
    run(1, ask_for_dedup)
