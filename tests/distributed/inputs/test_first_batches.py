"""A batch that was not accepted, or has no samples, teaches a module nothing about later ones."""

import copy
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.distributed import models
from tests.distributed.inputs.test_input_check import checker
from tests.distributed.inputs.test_variable_batch import make_variable
from tests.processes import run
from tests.quant import models as quant
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BoundedLagPipeline
from torchrec_bls.errors import BLSError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
LOOKUPS = ["exchange", "direct"]
ORDER = [4, 2, 0, 1, 3]


def empty(
    kind: models.Kind, lengths: torch.dtype, ids: torch.dtype, keys: list[str]
) -> KeyedJaggedTensor:
    weights = torch.empty(0, dtype=torch.float64) if kind.name == "weighted" else None
    return KeyedJaggedTensor(
        keys, torch.empty(0, dtype=ids), weights, torch.empty(0, dtype=lengths), stride=0
    )


def in_types(
    ids: KeyedJaggedTensor, lengths: torch.dtype, values: torch.dtype, weights: torch.dtype
) -> KeyedJaggedTensor:
    of_ids = ids.weights_or_none()
    return KeyedJaggedTensor(
        ids.keys(),
        ids.values().to(values),
        None if of_ids is None else of_ids.to(weights),
        ids.lengths().to(lengths),
    )


def mix_of(kind: models.Kind) -> str:
    """Returns a sharding whose outputs are the unsharded module's: means beside others are not."""
    return "row_wise" if kind.name == "ebc" else "mixed"


# Ids that fit all dtypes, and weights that half floats hold.
def exact(kind: models.Kind, seed: int, samples: int = 3) -> KeyedJaggedTensor:
    ids = models.make_ids(kind, seed, samples)
    if ids.weights_or_none() is not None:
        ids = in_types(ids, torch.int32, torch.int64, torch.float16)
    return ids


def look_up(model: Any, ids: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return models.flatten(model(models.Batch(ids)))


def begin_with_weights_on_one_rank(rank: int, kind: models.Kind) -> str:
    model = models.shard(kind, mix_of(kind), kind.bls_sharder(BLSConfig(deadline=60)))
    ids = models.make_ids(kind, rank, 3)
    if rank == 1:
        weights = torch.ones(ids.values().numel())
        ids = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
    with pytest.raises(BLSError) as caught:
        models.arrived(look_up(model, ids))
    return str(caught.value)


@pytest.mark.parametrize("kind", slow_but(["ebc"], ["ebc", "ec"]))
def test_ranks_of_which_one_has_weights_are_told_apart(kind: str) -> None:
    """TorchRec's ranks then send messages of other sizes than they receive, over gloo."""
    for text in run(2, begin_with_weights_on_one_rank, KINDS[kind]):
        assert "rank 1 do not fit: they have weights, but those from rank 0 have none" in text
        assert "Give the KeyedJaggedTensors of all ranks weights, or of none" in text


def begin_with_other_dtypes(rank: int, kind: models.Kind, lookup: str) -> None:
    """Rank 0 begins without samples, rank 1 with some, and every batch has dtypes of its own."""
    model = models.shard(
        kind, mix_of(kind), kind.bls_sharder(BLSConfig(deadline=60, lookup=lookup))
    )
    whole = models.SparseOnly(kind.module())
    types = [
        (torch.int64, torch.int32, torch.float64),
        (torch.int32, torch.int64, torch.float16),
        (torch.int64, torch.int64, torch.float32),
        (torch.int32, torch.int32, torch.float32),
    ]
    for step in range(4):
        of_lengths, of_ids, of_weights = types[(step + rank) % 4]
        if step == 0 and rank == 0:
            look_up(model, empty(kind, of_lengths, of_ids, kind.features))
            continue
        ids = exact(kind, 10 * step + rank)
        found = look_up(model, in_types(ids, of_lengths, of_ids, of_weights))
        expected = look_up(whole, in_types(ids, torch.int32, torch.int64, torch.float32))
        close(found, expected)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares outputs whose names are in the orders of different plans."""
    if len(found) == 1:  # pooled: columns by name
        found, expected = (by_name(output) for output in (found, expected))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def by_name(output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ((title, values),) = output.items()
    names, _, dims = title.partition(" ")
    widths = [int(dim) for dim in dims.strip("[]").split(", ")]
    return dict(zip(names.split("|"), values.split(widths, dim=1), strict=True))


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("kind", slow_but(["weighted", "ec"], KINDS))
def test_ranks_begin_with_any_dtypes(kind: str, lookup: str) -> None:
    run(2, begin_with_other_dtypes, KINDS[kind], lookup)


def begin_with_a_refused_batch(rank: int, kind: models.Kind, lookup: str) -> None:
    """Rank 0's first batches have other keys, and are refused or have no samples."""
    model = models.shard(
        kind, mix_of(kind), kind.bls_sharder(BLSConfig(deadline=60, lookup=lookup))
    )
    whole = models.SparseOnly(kind.module())
    keys = [*kind.features, "stranger"]
    for step in range(6):
        ids = models.make_ids(kind, 10 * step + rank, 3)
        if rank == 0 and step in (0, 2):
            bad = ids.permute(ORDER)
            bad.values()[0] = 10**6
            with pytest.raises(ValueError, match="id 1000000"):
                look_up(model, bad)
        elif rank == 0 and step == 1:
            with pytest.warns(UserWarning, match="stranger"):
                look_up(model, empty(kind, torch.int64, torch.int32, keys[::-1]))
        elif rank == 0 and step == 3:
            look_up(model, empty(kind, torch.int64, torch.int32, kind.features[::-1]))
        else:
            close(look_up(model, ids), look_up(whole, ids))


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("kind", slow_but(["ebc", "ec"], KINDS))
def test_a_refused_or_empty_first_batch_fixes_no_keys(kind: str, lookup: str) -> None:
    run(2, begin_with_a_refused_batch, KINDS[kind], lookup)


def begin_quantized(rank: int, kind: str, lookup: str) -> None:
    model = quant.model_of(kind, ["int8"] * 4)
    model.embeddings.__dict__["__cache_features_order"] = True
    whole = copy.deepcopy(model)
    config = BLSConfig(deadline=60, lookup=lookup)
    sharded = quant.shard(model, quant.sharder_of(kind, config), "table_wise")
    backwards = quant.FEATURES[::-1]
    for step in range(4):
        # The module's own order is not that of the batches.
        ids = quant.make_ids(kind, 10 * step + rank, 3, keys=backwards)
        if rank == 0 and step < 2:
            bad = quant.make_ids(kind, step, step and 3)
            if step == 1:
                bad.values()[0] = 10**6
                with pytest.raises(ValueError, match="id 1000000"):
                    look_up(sharded, bad)
            else:
                look_up(sharded, bad)
        else:
            models.assert_same_bits(look_up(sharded, ids), look_up(whole, ids))


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("kind", slow_but(["weighted", "ec"], quant.KINDS))
def test_quantized_modules_learn_nothing_either(kind: str, lookup: str) -> None:
    run(2, begin_quantized, kind, lookup)


def begin_a_pipeline(rank: int, kind: models.Kind) -> None:
    model = models.shard(kind, mix_of(kind), kind.bls_sharder(BLSConfig(deadline=60, bound=2)))
    whole = models.SparseOnly(kind.module())
    good = [models.Batch(models.make_ids(kind, 10 * step + rank, 3)) for step in range(6)]
    batches = list(good)
    if rank == 0:
        bad = good[1].ids.permute(ORDER)
        bad.values()[0] = -1
        keys = ["stranger", *kind.features]
        batches[:3] = [
            models.Batch(empty(kind, torch.int64, torch.int32, keys)),
            models.Batch(bad),
            None,  # type: ignore[list-item]
        ]
    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    source = iter(batches)
    for step, batch in enumerate(good):
        if rank == 0 and step == 1:
            with pytest.raises(ValueError, match="id -1"):
                pipeline.progress(source)
            continue
        output = pipeline.progress(source)
        if rank or step > 2:
            close(models.flatten(output), look_up(whole, batch.ids))


@pytest.mark.parametrize("kind", slow_but(["ebc", "ec"], KINDS))
@pytest.mark.filterwarnings("ignore:.*stranger")
def test_batches_in_flight_keep_their_own_keys(kind: str) -> None:
    run(2, begin_a_pipeline, KINDS[kind])


def test_only_accepted_batches_fix_the_order_of_inverse_indices() -> None:
    check = checker()
    kind = models.Kind("ebc", tables=2)
    bad = make_variable(kind, 0, [1, 2], 3)
    bad.values()[:] = 10**6
    backwards = bad.inverse_indices()[0][::-1]
    bad._inverse_indices = (backwards, bad.inverse_indices()[1].flip(0))
    with pytest.raises(ValueError, match="out of range"):
        check.check(bad)
    good = make_variable(kind, 1, [2, 1], 3)
    good.values().clamp_(max=9)
    check.check(good)
    good._inverse_indices = (backwards, good.inverse_indices()[1].flip(0))
    with pytest.raises(ValueError, match="keep keys and their order the same in all batches"):
        check.check(good)
