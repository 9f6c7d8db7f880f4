"""Large tables are read through pages of 2 MiB, and those that could not be had are counted."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.inference.modules import quantize_inference_model

from tests.distributed.models import arrived
from tests.processes import run
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingBagCollectionSharder,
    huge_pages,
    publish,
    serving_state,
)
from torchrec_bls._native import FIRST_TABLE_OFFSET, TableSegment
from torchrec_bls.direct.serving.reading_modules import reading_modules
from torchrec_bls.errors import RendezvousError

ROWS, COLUMNS = 150_000, 64
# INT8 rows are padded to TorchRec's 16 bytes.
ROW_BYTES = {False: 4 * COLUMNS, True: 80}
HUGE_PAGE = 2 << 20
PR_SET_THP_DISABLE = 41
LABEL = (0, "1", bytes(32))


class Model(nn.Module):
    """Looks a batch up in a table of 38 MB, or 12 MB in INT8."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            num_embeddings=ROWS, embedding_dim=COLUMNS, name="big", feature_names=["f"]
        )
        self.bags: Any = EmbeddingBagCollection(tables=[table])

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return arrived(self.bags(ids)).values().clone()


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Returns the weights of a version: whole numbers, which INT8 rounds by less than 1."""
    rows = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) * number % 251
    return {"bags.embedding_bags.big.weight": rows.float()}


def sharded(quantized: bool, asked: huge_pages.HugePages | None) -> Any:
    """Returns the model with the weights of version 1. Each of two ranks has half of the table."""
    config = BLSConfig(lookup="direct", deadline=30.0, huge_pages=asked)
    model = Model()
    model.load_state_dict(weights_of(1))
    sharder: Any = BLSEmbeddingBagCollectionSharder({"learning_rate": 0.1}, config=config)
    if quantized:
        model.bags = quantize_inference_model(nn.ModuleDict({"bags": model.bags}))["bags"]
        sharder = BLSQuantEmbeddingBagCollectionSharder(config=config)
    plan = construct_module_sharding_plan(
        model.bags,
        {"big": row_wise()},
        sharder=sharder,
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    if not quantized:
        plan["big"].compute_kernel = "fused"
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": plan}),
        sharders=[sharder],
    )


def look_up(model: Any) -> torch.Tensor:
    """Returns sums of rows of all parts of the table."""
    ids = torch.arange(0, ROWS, 97)
    with torch.no_grad():
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int32))
        looked_up: torch.Tensor = model(features)
        return looked_up


def assert_is(looked_up: torch.Tensor, number: int, quantized: bool) -> None:
    """The rows are those of a version."""
    (weights,) = weights_of(number).values()
    assert torch.allclose(looked_up, weights[::97], rtol=0, atol=1.0 if quantized else 0.0)


def huge_bytes() -> int:
    """Returns the bytes of tables that this process maps as pages of 2 MiB."""
    smaps = Path("/proc/self/smaps").read_text()
    mappings = re.findall(r"/memfd:torchrec_bls.*?VmFlags", smaps, re.DOTALL)
    kilobytes = re.findall(r"(?:PmdMapped|_Hugetlb): +([0-9]+) kB", "".join(mappings))
    return sum(map(int, kilobytes)) << 10


def host_has_them() -> bool:
    segment = TableSegment.create(LABEL, [], 4 * HUGE_PAGE, True)
    return not segment.small_page_bytes


def pages_in_pool() -> int:
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(pool.read_text()) if pool.exists() else 0


def disable_transparent_pages(disabled: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, disabled, 0, 0, 0) == 0


def read_through_huge_pages(rank: int, quantized: bool) -> None:
    model = sharded(quantized, True)
    # All but the ends of the segments: at most two pages of 2 MiB of each owner.
    stored = ROWS * ROW_BYTES[quantized]
    assert_is(look_up(model), 1, quantized)
    assert huge_bytes() >= stored - 4 * HUGE_PAGE
    assert serving_state(model).small_page_bytes == 0
    publish(model, weights_of(3), version="3").wait(60.0)
    assert_is(look_up(model), 3, quantized)
    assert serving_state(model).version == "3"
    assert huge_bytes() >= stored - 4 * HUGE_PAGE

    disable_transparent_pages(True)
    publish(model, weights_of(5), version="5").wait(60.0)
    assert_is(look_up(model), 5, quantized)
    small = serving_state(model).small_page_bytes
    assert stored - 4 * HUGE_PAGE <= small <= stored + 4 * HUGE_PAGE
    torch.distributed.barrier()


@pytest.mark.parametrize("quantized", [False, True])
def test_tables_are_read_through_pages_of_2_mib(quantized: bool) -> None:
    if not host_has_them():
        pytest.skip("this host gives no transparent pages of 2 MiB to shared memory")
    run(2, read_through_huge_pages, quantized)


def read_through_pool(rank: int, quantized: bool) -> None:
    model = sharded(quantized, "hugetlb")
    for version in (1, 3):
        if version > 1:
            publish(model, weights_of(version), version=str(version)).wait(60.0)
        assert_is(look_up(model), version, quantized)
        assert huge_bytes() >= ROWS * ROW_BYTES[quantized]
    assert serving_state(model).small_page_bytes == 0
    torch.distributed.barrier()


@pytest.mark.parametrize("quantized", [False, True])
def test_tables_in_pages_of_the_pool(quantized: bool) -> None:
    if pages_in_pool() < 100:
        pytest.skip("this host's pool has too few pages of 2 MiB: sysctl vm.nr_hugepages=100")
    run(2, read_through_pool, quantized)


def ask_by_size(rank: int, quantized: bool) -> None:
    stored = ROWS * ROW_BYTES[quantized]
    for least, asks in ((stored + 8 * HUGE_PAGE, False), (stored - 8 * HUGE_PAGE, True)):
        huge_pages._FROM_BYTES = least
        model = sharded(quantized, None)
        look_up(model)
        (module,) = reading_modules(model).values()
        assert module.direct_reads is not None
        assert module.direct_reads.tables.huge_pages is asks
    torch.distributed.barrier()


@pytest.mark.parametrize("quantized", [False, True])
def test_large_modules_ask_by_default(quantized: bool) -> None:
    run(2, ask_by_size, quantized)


def ask_for_different_pages(rank: int, quantized: bool) -> None:
    pattern = (
        r"huge_pages differs between ranks \(ranks \[0\]: True; ranks \[1\]: False\)\. "
        r"Give all ranks the same BLSConfig\(huge_pages=\.\.\.\)"
    )
    with pytest.raises(RendezvousError, match=pattern):
        look_up(sharded(quantized, rank == 0))


@pytest.mark.parametrize("quantized", [False, True])
def test_ranks_that_ask_for_different_pages_are_told(quantized: bool) -> None:
    run(2, ask_for_different_pages, quantized)


def test_from_a_gibibyte_on() -> None:
    assert huge_pages.huge_pages_for(None, 1 << 30) is True
    assert huge_pages.huge_pages_for(None, (1 << 30) - 1) is False
    assert huge_pages.huge_pages_for(False, 1 << 40) is False
    assert huge_pages.huge_pages_for(True, 1) is True
    assert huge_pages.huge_pages_for("hugetlb", 1) == "hugetlb"


@pytest.mark.parametrize("asked", ["yes", "hugetlbfs", 2])
def test_another_choice_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"huge_pages is .*must be None, False, True or 'hugetlb'"):
        BLSConfig(huge_pages=asked)


def test_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="huge_pages is 'hugetlbfs'"):
        TableSegment.create(LABEL, [], FIRST_TABLE_OFFSET, "hugetlbfs")


def test_a_pool_without_pages_says_how_to_fill_it() -> None:
    with pytest.raises(RendezvousError, match=r"from the host's pool.*sysctl vm\.nr_hugepages"):
        TableSegment.create(LABEL, [], 1 << 45, "hugetlb")
