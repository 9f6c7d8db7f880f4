"""Native code reads no tensor that is not there, or of numbers that it does not know."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.distributed import models
from tests.processes import run
from torchrec_bls import BLSConfig
from torchrec_bls.distributed.inputs import input_check
from torchrec_bls.distributed.inputs.input_check import InputCheck

TABLES = [
    EmbeddingBagConfig(name=f"t{i}", num_embeddings=10, embedding_dim=4, feature_names=[f"f{i}"])
    for i in range(2)
]


def checker(is_weighted: bool = False) -> InputCheck:
    return InputCheck("bags", TABLES, is_weighted, "refuse")


def features(
    values: Any = (1, 2, 3),
    lengths: Any = (1, 2),
    weights: torch.Tensor | None = None,
    stride: int | None = None,
    dtype: torch.dtype = torch.int64,
    of_lengths: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.tensor(values, dtype=dtype),
        weights=weights,
        lengths=torch.tensor(lengths, dtype=of_lengths),
        stride=stride,
    )


REFUSED: dict[str, tuple[Callable[[], KeyedJaggedTensor], str]] = {
    "another device": (lambda: features().to(torch.device("meta")), "values are on meta|on meta"),
    "floats as ids": (
        lambda: features(dtype=torch.float32),
        "values are torch.float32, not integers",
    ),
    "bools as ids": (lambda: features(dtype=torch.bool), "values are torch.bool, not integers"),
    "integers as weights": (
        lambda: features(weights=torch.ones(3, dtype=torch.int64)),
        "weights are torch.int64, not floats",
    ),
    "too few weights": (lambda: features(weights=torch.ones(2)), "2 weights for 3 ids"),
    "stride beyond the lengths": (
        lambda: features(stride=1 << 20),
        r"2 lengths, but 2 keys and stride 1048576 make 2097152",
    ),
    "stride below the lengths": (
        lambda: features(lengths=(1, 0, 1, 1), stride=1),
        "4 lengths, but 2 keys and stride 1 make 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_native_code_cannot_read_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        checker().check(make())


@pytest.mark.parametrize("of_lengths", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_small_integers_are_widened(dtype: torch.dtype, of_lengths: torch.dtype) -> None:
    batch = checker().check(features(dtype=dtype, of_lengths=of_lengths))
    assert batch.features.values().tolist() == [1, 2, 3]
    assert batch.features.lengths().tolist() == [1, 2]
    assert batch.counts == [1, 2]
    assert {batch.features.values().dtype, batch.features.lengths().dtype} == {torch.int32}


def test_a_batch_keeps_its_dtypes() -> None:
    check = checker()
    for dtype, of_lengths in ((torch.int32, torch.int64), (torch.int64, torch.int32)):
        batch = check.check(features(dtype=dtype, of_lengths=of_lengths))
        found = batch.features
        assert (found.values().dtype, found.lengths().dtype) == (dtype, of_lengths)


def test_weights_come_with_all_batches_or_none() -> None:
    check = checker(is_weighted=True)
    check.check(features(weights=torch.ones(3)))
    with pytest.raises(ValueError, match="has no weights, but that of the first batch had some"):
        check.check(features())
    check = checker()
    check.check(features())
    with pytest.raises(ValueError, match="has some weights, but that of the first batch had no"):
        check.check(features(weights=torch.ones(3)))


def test_strided_tensors_are_made_contiguous() -> None:
    ids = features()
    strided = KeyedJaggedTensor(
        ids.keys(), torch.arange(6)[::2], lengths=torch.tensor([1, 9, 2, 9], dtype=torch.int32)[::2]
    )
    batch = checker().check(strided)
    assert batch.features.values().is_contiguous() and batch.features.lengths().is_contiguous()
    assert (batch.features.values().tolist(), batch.counts) == ([0, 2, 4], [1, 2])


def look_small_integers_up(rank: int) -> None:
    """All dtypes that TorchRec takes, and ranks may have different ones after the first batch."""
    for kind in (models.EC, models.EBC, models.WEIGHTED):
        ours = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(deadline=20)))
        theirs = models.shard(kind, "mixed", kind.torchrec_sharder())
        with torch.no_grad():
            for step, dtype in enumerate(
                [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
            ):
                ids = models.make_ids(kind, 10 * step + rank, 3)
                of_ours = dtype if rank else torch.int64
                given = KeyedJaggedTensor(
                    ids.keys(),
                    ids.values().to(of_ours),
                    ids.weights_or_none(),
                    ids.lengths().to(dtype if step else torch.int32),
                )
                if step == 0:
                    given = ids
                ours_out = models.flatten(ours(models.Batch(given)))
                models.assert_same_bits(ours_out, models.flatten(theirs(models.Batch(ids))))


def test_integers_of_any_size_are_looked_up_as_torchrec_does() -> None:
    run(2, look_small_integers_up)


def begin_without_a_batch(rank: int) -> None:
    """A rank that refuses its first batch learns the keys, in whatever order, at the second."""
    for kind in (models.EC, models.EBC, models.WEIGHTED):
        ours = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(deadline=20)))
        theirs = models.shard(kind, "mixed", kind.torchrec_sharder())
        with torch.no_grad():
            for step in range(3):
                ids = models.make_ids(kind, 10 * step + rank, 3).permute([4, 2, 0, 1, 3])
                expected = models.flatten(theirs(models.Batch(ids)))
                if rank == 0 and step == 0:
                    with pytest.raises(ValueError, match="input is a Tensor"):
                        models.arrived(ours(models.Batch(torch.zeros(1))))  # type: ignore[arg-type]
                else:
                    models.assert_same_bits(models.flatten(ours(models.Batch(ids))), expected)


def test_a_rank_may_begin_without_a_batch() -> None:
    run(2, begin_without_a_batch)


def test_a_child_that_is_forked_while_a_batch_is_counted_checks_its_own() -> None:
    with input_check._CHANGING:
        child = os.fork()
        if child == 0:
            os._exit(0 if input_check._CHANGING.acquire(timeout=0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
