"""What sharded modules look up is recorded, and bounds that were found are used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from tests.distributed import models
from tests.processes import run
from torchrec_bls import BLSConfig, CodecConfig, ErrorBound, record_lookups
from torchrec_bls.analysis.samples import Samples
from torchrec_bls.cli.main import run as run_command
from torchrec_bls.distributed.codec_config import forward_of, unique_of

KINDS = (models.EC, models.EBC, models.WEIGHTED)


def batches_of(rank: int, kind: models.Kind) -> list[models.Batch]:
    return [models.Batch(models.make_ids(kind, 10 * rank + step, 7 + rank)) for step in range(2)]


def sharding_of(kind: models.Kind) -> str:
    # TorchRec divides twice where means are cut by rows and sums are not.
    return "table_wise" if kind is models.EBC else "mixed"


def record(rank: int, folder: Path) -> None:
    for kind in KINDS:
        sharders = {
            "torchrec": kind.torchrec_sharder(),
            "bls": kind.bls_sharder(BLSConfig(deadline=20)),
            "plain": None,
        }
        for name, sharder in sharders.items():
            model: Any = (
                models.SparseOnly(kind.module())
                if sharder is None
                else models.shard(kind, sharding_of(kind), sharder)
            )
            # Rank 1 only takes part in one of them.
            recorded = rank == 0 or kind is not models.WEIGHTED
            path = folder / f"{kind.name}-{name}-{rank}" if recorded else None
            before = hooks_of(model)
            record_lookups(model, batches_of(rank, kind), path)
            assert hooks_of(model) == before


def hooks_of(model: Any) -> list[list[int]]:
    return [list(module._forward_hooks) for module in model.modules()]


def compare(samples: Samples, plain: Samples) -> None:
    assert samples.tables == plain.tables
    for table in plain.tables:
        for found, wanted in zip(samples.of(table), plain.of(table), strict=True):
            for lookup, other in zip(found, wanted, strict=True):
                assert np.array_equal(lookup.ids, other.ids)
                assert np.array_equal(lookup.lengths, other.lengths)
                # Row-wise tables are added up in another order.
                assert np.allclose(lookup.rows, other.rows, atol=1e-5)


def train(rank: int, bounds: Path) -> list[float]:
    """Returns the largest errors of embeddings, by the stages of two links."""
    kind, errors = models.EBC, []
    batch = batches_of(rank, kind)[0]
    plain: Any = kind.module()
    wanted = plain(batch.ids).to_dict()
    for link in (None, 1e3):
        config = CodecConfig.from_file(bounds, link)
        sharder = kind.bls_sharder(BLSConfig(codecs=config, deadline=20))
        found = models.arrived(models.shard(kind, sharding_of(kind), sharder)(batch)).to_dict()
        sum(rows.sum() for rows in found.values()).backward()
        errors += [
            float((rows - wanted[name]).detach().abs().max()) for name, rows in found.items()
        ]
    return errors


def test_sharded_modules_are_recorded_and_bounds_are_used(tmp_path: Path) -> None:
    run(2, record, tmp_path)
    for kind in KINDS:
        for rank in range(1 if kind is models.WEIGHTED else 2):
            plain = Samples(tmp_path / f"{kind.name}-plain-{rank}")
            for name in ("torchrec", "bls"):
                compare(Samples(tmp_path / f"{kind.name}-{name}-{rank}"), plain)
    bounds = tmp_path / "bounds.json"
    options = ["--gbit", "0.00001", "--bounds", "0.01", "0.02", "0.03", "--out", str(bounds)]
    samples = str(tmp_path / "ebc-bls-0")
    assert run_command(["analyse-tables", "--samples", samples, *options]) == 0
    assert json.loads(bounds.read_text())["link"] == 1_250
    config = CodecConfig.from_file(bounds)
    # So slow are these links that bytes alone matter, however slow the machine is.
    assert all(isinstance(forward_of(config, f"t{i}"), ErrorBound) for i in range(5))
    assert all(unique_of(config, f"t{i}") for i in range(5))
    for errors in run(2, train, bounds):
        assert len(errors) == 2 * 6
        assert all(0 < error <= 0.03 for error in errors), errors


def no_samples(rank: int, folder: Path) -> None:
    kind = models.EC
    none = KeyedJaggedTensor(
        kind.features, torch.empty(0).long(), lengths=torch.empty(0).int(), stride=0
    )
    model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(bound=2, deadline=20)))
    batches = [models.Batch(none), *batches_of(rank, kind)]
    record_lookups(model, batches if rank == 0 else batches[1:] + batches[:1], folder / str(rank))


def test_a_rank_without_samples(tmp_path: Path) -> None:
    run(2, no_samples, tmp_path)
    for rank, order in enumerate(([0, 1, 1], [1, 1, 0])):
        samples = Samples(tmp_path / str(rank))
        lookups = samples.of(samples.tables[0])
        assert [len(each[0].lengths) > 0 for each in lookups] == order
