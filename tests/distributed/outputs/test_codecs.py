"""Sharded modules whose embeddings and gradients travel encoded.

What arrives has to be, bit for bit, what the numpy reference makes of the rows that were sent.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed import DistributedModelParallel

from tests.codecs import reference
from tests.distributed import models
from tests.distributed.results.test_exactness import batches_of, forward, piped_outputs
from tests.distributed.results.test_training import state_of
from tests.processes import run
from tests.tiers import slow_but, slow_where
from torchrec_bls import BLSConfig, CodecConfig, _native
from torchrec_bls.errors import PoisonedError, ProtocolError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
CODECS = {"t0": "uint4", "t1": "uint2", "t2": "uint8", "t3": "uint4", "t4": "bf16"}
BITS = {"uint8": 8, "uint4": 4, "uint2": 2}
# Table-row-wise sharding needs several hosts, which these ranks pretend to be.
NODES = {3: 1, 4: 2}


def expected_of(rows: torch.Tensor, codec: str) -> torch.Tensor:
    """Returns what arrives of [rows, columns]."""
    if codec == "bf16":
        return rows.bfloat16().float()
    shape = (rows.shape[0], rows.shape[1])
    encoded = reference.encode(rows.numpy(), BITS[codec])
    return torch.from_numpy(reference.decode(encoded, shape, BITS[codec]))


def round_lookups(model: DistributedModelParallel, kind: models.Kind) -> None:
    """Has the lookups of a model return what would arrive of their rows."""
    (embeddings,) = model.module.children()
    for lookup in embeddings._lookups:
        shards = [
            (CODECS[table.name], table.local_cols)
            for kernel in lookup._emb_modules
            for table in kernel.config.embedding_tables
            for _ in table.feature_names
        ]
        lookup.register_forward_hook(rounding_by(expected_of, kind, shards))


def rounding_by(
    arriving_of: Callable[[torch.Tensor, Any], torch.Tensor],
    kind: models.Kind,
    shards: list[tuple[Any, int]],
) -> Callable[..., torch.Tensor]:
    """Returns a hook for a lookup of features with so many columns each, and what to give
    `arriving_of` behind their rows."""

    def rounded(_: Any, inputs: tuple[Any], rows: torch.Tensor) -> torch.Tensor:
        if not shards:
            return rows
        if kind.name == "ec":  # flat
            parts = rows.view(-1, shards[0][1]).split(inputs[0].length_per_key())
        else:
            parts = rows.split([columns for _, columns in shards], dim=1)
        arriving = [arriving_of(part, how) for part, (how, _) in zip(parts, shards, strict=True)]
        return torch.cat(arriving).view(-1) if kind.name == "ec" else torch.cat(arriving, dim=1)

    return rounded


def compare_forward(rank: int, world_size: int, kind: models.Kind) -> None:
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    plain = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig()), nodes)
    round_lookups(plain, kind)
    batches = batches_of(kind, rank)
    # TorchRec cannot look up batches without samples, unlike the exchange.
    batches = [ids for ids in batches if ids.stride() > 0 or kind.name == "ec"]
    batches = batches[:3] + batches[-1:]
    expected = [forward(plain, ids) for ids in batches]
    for transport in ("shm", "tcp"):
        config = BLSConfig(codecs=CodecConfig(forward=CODECS), transport=transport)
        model = models.shard(kind, "mixed", kind.bls_sharder(config), nodes)
        for ids, wanted in zip(batches, expected, strict=True):
            models.assert_same_bits(forward(model, ids), wanted)
    for bound in (1, 4):
        config = BLSConfig(bound=bound, codecs=CodecConfig(forward=CODECS))
        outputs = piped_outputs(kind, "mixed", nodes, config, batches)
        for output, wanted in zip(outputs, expected, strict=True):
            models.assert_same_bits(output, wanted)


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks == 3, NODES))
@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_embeddings_are_what_the_reference_makes_of_the_rows(kind: str, world_size: int) -> None:
    run(world_size, compare_forward, world_size, KINDS[kind])


def compare_with_unsharded(rank: int) -> None:
    config = BLSConfig(codecs=CodecConfig(forward="uint4"))
    module = models.EC.module()
    ids = models.make_ids(models.EC, rank, 6)
    with torch.no_grad():
        unsharded = module(ids)
    for sharding in ("table_wise", "row_wise"):
        model = models.shard(models.EC, sharding, models.EC.bls_sharder(config))
        output = forward(model, ids)
        for name, jagged in unsharded.items():
            wanted = expected_of(jagged.values(), "uint4")
            models.assert_same_bits({name: output[f"{name} values"]}, {name: wanted})


def test_embeddings_are_what_the_reference_makes_of_the_unsharded_rows() -> None:
    run(3, compare_with_unsharded)


def gradients(kind: models.Kind, output: Any, step: int) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yields name, embeddings and a gradient for each feature of the output."""
    generator = torch.Generator().manual_seed(step)
    if kind.name == "ec":
        values = {name: jagged.values() for name, jagged in output.items()}
    else:
        columns = output.values().split(output.length_per_key(), dim=1)
        values = dict(zip(output.keys(), columns, strict=True))
    for name, of_feature in values.items():
        yield name, of_feature, torch.randn(of_feature.shape, generator=generator)


def rounded_gradient(
    kind: models.Kind, nodes: int, name: str, gradient: torch.Tensor
) -> torch.Tensor:
    feature, _, table = name.partition("@")
    table = table or f"t{feature[1:]}"
    cut = models.sharding_types(kind, "mixed", nodes)[int(table[1:])] == "column_wise"
    shards = gradient.chunk(2 if cut else 1, dim=1)
    return torch.cat([expected_of(part.contiguous(), CODECS[table]) for part in shards], dim=1)


def compare_training(rank: int, world_size: int, kind: models.Kind) -> None:
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    states = []
    for codecs in (CodecConfig(backward=CODECS), None):
        model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(codecs=codecs)), nodes)
        before = state_of(model)
        for step in range(3):
            samples = 3 + (rank + step) % 4
            output = models.arrived(
                model(models.Batch(models.make_ids(kind, 100 * rank + step, samples)))
            )
            loss = torch.zeros(())
            for name, values, gradient in gradients(kind, output, step):
                if codecs is None:
                    gradient = rounded_gradient(kind, nodes, name, gradient)
                loss = loss + (values * gradient).sum()
            loss.backward()
        states.append(state_of(model))
    models.assert_same_bits(*states)
    assert any(not torch.equal(states[0][name], before[name]) for name in before)


# The embeddings of an EBC with mean pooling are divided behind the exchange.
@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks == 3, NODES))
@pytest.mark.parametrize("kind", slow_but(["ec"], ["ec", "weighted"]))
def test_gradients_are_what_the_reference_makes_of_them(kind: str, world_size: int) -> None:
    run(world_size, compare_training, world_size, KINDS[kind])


def forward_with_nan(rank: int, transport: str) -> None:
    config = BLSConfig(codecs=CodecConfig(forward="uint2"), slot_bytes=1024, transport=transport)
    model = models.shard(models.EC, "table_wise", models.EC.bls_sharder(config))
    plain = models.shard(models.EC, "table_wise", models.EC.bls_sharder(BLSConfig()))
    for sharded in (model, plain):
        for name, value in sharded.state_dict().items():
            if name.endswith("t0.weight"):
                for local in value.local_shards():
                    local.tensor[:, 3] = torch.nan
    ids = models.make_ids(models.EC, rank, 60)
    output, wanted = forward(model, ids), forward(plain, ids)
    name = next(name for name in output if name.startswith("f0") and name.endswith("t0 values"))
    assert torch.isnan(output[name][:, 3]).all()
    models.assert_same_bits({name: output[name]}, {name: wanted[name]})
    (embeddings,) = model.module.children()
    (channel,) = (c for n, c in embeddings.channels().items() if n.endswith(".embeddings"))
    assert channel.stats().pulled_messages > 0 or rank != 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rows_that_are_not_finite_arrive_as_they_are(transport: str) -> None:
    run(2, forward_with_nan, transport)


def forward_refusing(rank: int) -> None:
    config = BLSConfig(codecs=CodecConfig(forward="uint4", non_finite="refuse"), deadline=20)
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    forward(model, models.make_ids(models.EBC, rank, 4))
    if rank == 1:
        for value in model.state_dict().values():
            for local in value.local_shards():
                local.tensor.fill_(torch.inf)
    error = ValueError if rank == 1 else PoisonedError
    with pytest.raises(error, match=r"\d+ of \d+ rows hold NaN or infinities"):
        forward(model, models.make_ids(models.EBC, rank, 4))


def test_rows_that_are_not_finite_may_be_refused() -> None:
    run(2, forward_refusing)


# What stands where in a frame, and what is said when it is damaged.
FIELDS = {
    "magic": (0, r"magic number \d+, expected \d+: install one version"),
    "version": (2, r"version 19, expected 3: install one version"),
    "flags": (3, "flags 16, expected 0: install one version"),
    "checksum": (5, "checksum differs"),
    "rows": (8, "checksum differs"),
    "tables": (16, "checksum differs"),
    "groups of equal rows": (20, "checksum differs"),
    "checksum of bounds": (24, "checksum differs"),
    "codec": (28, "checksum differs"),
    "rows themselves": (60, "checksum differs"),
}


def forward_damaged(rank: int, at: int, said: str) -> None:
    config = BLSConfig(codecs=CodecConfig(forward="uint4"), deadline=20)
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    forward(model, models.make_ids(models.EBC, rank, 4))
    if rank == 0:
        collect = _native.collect_frames

        def collect_damaged(arrival: Any, frames: Any, summed: bool) -> None:
            arrival.view(2, 0)[at] ^= 0x10
            collect(arrival, frames, summed)

        _native.collect_frames = collect_damaged
        with pytest.raises(
            ProtocolError, match=rf"from rank 2, the frame of encoded .*{said}"
        ) as raised:
            forward(model, models.make_ids(models.EBC, rank, 4))
        (embeddings,) = model.module.children()
        embeddings.fail(str(raised.value))  # also those who have all of this batch already
    else:
        with pytest.raises(PoisonedError, match=rf"rank 0 failed: .*from rank 2, .*{said}"):
            for _ in range(2):
                forward(model, models.make_ids(models.EBC, rank, 4))
    torch.distributed.barrier()  # who is gone early is taken for the one that failed


@pytest.mark.parametrize("field", slow_but(["version", "checksum", "rows themselves"], FIELDS))
def test_a_damaged_frame_is_refused_with_its_sender(field: str) -> None:
    run(3, forward_damaged, *FIELDS[field])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"forward": "uint3"}, "the forward codec is 'uint3', but must be one of fp32, fp16, bf16"),
        ({"backward": 4}, "the backward codec is 4, but must be one of"),
        ({"forward": {"t": "int8"}}, "the forward codec of table 't' is 'int8', but must be"),
        ({"non_finite": "drop"}, "non_finite is 'drop', but must be one of keep, refuse"),
    ],
)
def test_a_config_that_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CodecConfig(**arguments)


def shard_without_a_codec(rank: int) -> None:
    named = {f"t{i}": "uint4" for i in range(4)}
    for codecs, direction in (
        (CodecConfig(forward=named), "forward"),
        (CodecConfig(backward=named), "backward"),
    ):
        with pytest.raises(
            ValueError,
            match=f"table 't4' has no {direction} codec: name one for every table of the module",
        ):
            models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(codecs=codecs)))


def test_a_table_without_a_codec_is_refused() -> None:
    run(1, shard_without_a_codec)


def forward_in_half(rank: int) -> None:
    config = BLSConfig(codecs=CodecConfig(forward="uint4"), deadline=20)
    fused = {"learning_rate": 0.1, "output_dtype": SparseType.FP16}
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config, fused))
    # The rank that finds it first poisons the other.
    with pytest.raises((ValueError, PoisonedError), match=r"are torch.float16, but codecs need"):
        forward(model, models.make_ids(models.EBC, rank, 4))


def test_rows_that_are_not_float32_are_refused() -> None:
    run(2, forward_in_half)
