"""Where stored rows lie and come from, against TorchRec's quantized modules and by brute force."""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.tensor_types import UInt4Tensor

from tests.distributed.models import SparseOnly
from tests.quant import models
from torchrec_bls.direct import steps
from torchrec_bls.direct.layout import Shard
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.page_shares import Extent, PageShare, cuts_between, page_shares
from torchrec_bls.quant.shared_rows import PlacedRows
from torchrec_bls.quant.stored_tables import (
    ModuleRows,
    RowSource,
    StateDictRows,
    StoredTable,
    stored_rows,
)

PAGE = 16


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(models.TYPES)),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_rows_of_a_checkpoint_are_those_of_the_quantized_module(
    name: str, rows: int, eighths: int, half: bool, data: st.DataObject
) -> None:
    module = EmbeddingCollection(
        [
            EmbeddingConfig(
                num_embeddings=rows, embedding_dim=8 * eighths, name="t0", feature_names=["f0"]
            )
        ]
    )
    if half:
        module = module.half()
    checkpoint = {f"m.{key}": weight for key, weight in module.state_dict().items()}
    quantized = models.quantized(SparseOnly(module), [name]).embeddings
    lookups = Lookups(quantized, quantized.embeddings, False)
    (table,) = lookups.tables
    first = data.draw(st.integers(table.begin, table.end - 1))
    last = data.draw(st.integers(first + 1, table.end))
    theirs = stored_bytes(ModuleRows(quantized._emb_modules, lookups.begins), table, first, last)
    weights = quantized._emb_modules[0].weights_host
    assert torch.equal(theirs, weights[first:last])
    whole = {f"m.{key}": weight for key, weight in quantized.state_dict().items()}
    for given_rows in (checkpoint, whole, split_rows_of(quantized)):
        source = StateDictRows(given_rows, "m.embeddings.", "the checkpoint")
        source.check(table)
        assert torch.equal(stored_bytes(source, table, first, last), theirs)


def stored_bytes(source: RowSource, table: StoredTable, begin: int, end: int) -> torch.Tensor:
    """Returns the bytes [begin, end) of the memory of all tables, which are in `table`, uint8."""
    first = (begin - table.begin) // table.row_bytes
    last = -(-(end - table.begin) // table.row_bytes)
    rows = stored_rows(source, table, first, last).view(-1)
    skipped = begin - table.begin - first * table.row_bytes
    return rows[skipped : skipped + end - begin]


def split_rows_of(quantized: Any) -> dict[str, torch.Tensor]:
    """Returns a state dict with scale and shift beside the weights."""
    [(weight, *beside)] = quantized._emb_modules[0].split_embedding_weights_with_scale_bias(2)
    packed = type(quantized.embeddings["t0"].weight)
    parts = [weight if packed is torch.Tensor else packed(weight), *beside]
    names = ("weight", "weight_qscale", "weight_qbias")
    return {
        f"m.embeddings.t0.{name}": part
        for name, part in zip(names, parts, strict=True)
        if part is not None
    }


def owners_by_hand(extents: list[Extent], total: int) -> list[int]:
    """Returns the owner of each page: of its first byte, or else of the last before, or the first
    behind it."""
    owners: list[int] = []
    for byte in range(0, total, PAGE):
        before = [each for each in extents if each.begin <= byte and each.end > each.begin]
        owners.append((before or extents[:1])[-1].owner)
    return owners


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 70)), min_size=1))
def test_pages_belong_to_the_owner_of_their_first_byte(drawn: list[tuple[int, int, int]]) -> None:
    extents: list[Extent] = []
    at = 0
    for owner, gap, length in drawn:
        at += gap
        extents.append(Extent(owner, at, at + length))
        at += length
    total = -(-at // PAGE) * PAGE
    shares = page_shares(extents[::-1], total, PAGE)
    owners = [share.owner for share in shares for _ in range((share.end - share.begin) // PAGE)]
    assert owners == owners_by_hand(extents, total)
    assert [share.begin for share in shares] == [0, *[share.end for share in shares[:-1]]]
    for owner in set(owners):
        own = [share for share in shares if share.owner == owner]
        # One behind the other.
        offsets = [0]
        for share in own:
            offsets.append(offsets[-1] + share.end - share.begin)
        assert [share.offset for share in own] == offsets[:-1]
        rows = sum(each.end - each.begin for each in extents if each.owner == owner)
        gaps = sum(gap for _, gap, _ in drawn)
        assert offsets[-1] <= rows + gaps + PAGE * (len(own) + 1)


@cache
def module_of_four_types() -> Any:
    return models.model_of("ebc", ["int8", "int4", "int2", "fp16"]).embeddings


@settings(max_examples=30, deadline=None)
@given(st.integers(500, 50_000), st.integers(1, 4), st.booleans())
def test_bytes_of_an_owner_are_made_in_steps(size: int, owners: int, row_wise: bool) -> None:
    """Together they are the weights of the unsharded module, and none has more source rows than
    a step has bytes for, except for one."""
    quantized = module_of_four_types()
    lookups = Lookups(quantized, quantized.embedding_bags, False)
    source = ModuleRows(quantized._emb_modules, lookups.begins)
    shards = {}
    for number, table in enumerate(lookups.tables):
        block = -(-table.rows // owners) if row_wise else table.rows
        begins = range(0, table.rows, block)
        shards[table.name] = [
            Shard((number + i) % owners, begin, min(block, table.rows - begin), 0, table.columns)
            for i, begin in enumerate(begins)
        ]
    placed = PlacedRows.of(lookups.tables, shards, False)
    longest = max(
        table.row_bytes * max(1, size // max(table.row_bytes, 4 * table.columns))
        for table in lookups.tables
    )
    with patch.object(steps, "_STEP", size):
        segments = [
            torch.zeros(placed.size_of(owner), dtype=torch.uint8) for owner in range(owners)
        ]
        for owner, segment in enumerate(segments):
            for step in placed.content(owner, source, "")(0, placed.size_of(owner)):
                part = step.stored()
                assert 0 < len(part) == step.size <= longest
                segment[step.place : step.place + step.size] = part
    memory = torch.cat(
        [
            segments[share.owner][share.offset : share.offset + share.end - share.begin]
            for share in placed.shares
        ]
    )
    for lookup, begin in zip(quantized._emb_modules, lookups.begins, strict=True):
        weights = lookup.weights_host
        assert torch.equal(memory[begin : begin + len(weights)], weights)


def test_cuts_are_where_another_rank_begins() -> None:
    shares = [PageShare(0, 0, 16, 0), PageShare(0, 16, 32, 16), PageShare(1, 32, 48, 0)]
    assert cuts_between(shares) == [32]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (None, "has no 'm.t0.weight'"),
        (torch.zeros(4, 8), r"shape \(4, 8\)"),
        (torch.zeros(5, 8, dtype=torch.float64), "float64"),
        (torch.zeros(5, 8, dtype=torch.uint8), r"has INT8 rows of \(5, 16\)"),
        (UInt4Tensor(torch.zeros(5, 16, dtype=torch.uint8)), "a UInt4Tensor .* has INT8 rows"),
        (torch.zeros(5, 8, device="meta"), "meta"),
    ],
)
def test_a_checkpoint_that_does_not_fit(weights: torch.Tensor | None, says: str) -> None:
    module = EmbeddingCollection(
        [EmbeddingConfig(num_embeddings=5, embedding_dim=8, name="t0", feature_names=["f0"])]
    )
    quantized = models.quantized(SparseOnly(module), ["int8"]).embeddings
    (table,) = Lookups(quantized, quantized.embeddings, False).tables
    given_rows = {} if weights is None else {"m.t0.weight": weights}
    source = StateDictRows(given_rows, "m.", "the checkpoint")
    with pytest.raises(ValueError, match=says):
        source.check(table)
