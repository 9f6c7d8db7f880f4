"""Any number of threads call one model, while its weights change."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.direct.threads import call_while_publishing
from tests.distributed import models
from tests.processes import run
from tests.quant import models as quant_models
from torchrec_bls.distributed.inputs.input_check import InputCheck


@pytest.fixture
def short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_look_up_whole_generations_while_another_publishes() -> None:
    outputs = run(2, call_while_publishing, 8, 3.0, 0.05, deadline=300)
    assert all(outputs)


def call_quantized(rank: int, kind: str) -> None:
    sys.setswitchinterval(1e-5)
    batches = [quant_models.make_ids(kind, seed, 1 + 20 * seed) for seed in range(3)]
    types = ["int8", "int4", "int8", "int8"]
    whole = quant_models.model_of(kind, types)
    expected = [models.flatten(whole(models.Batch(ids))) for ids in batches]
    model = quant_models.shard(
        quant_models.model_of(kind, types), quant_models.sharder_of(kind), "mixed"
    )
    failures: list[BaseException] = []
    begin = threading.Barrier(4)

    def call() -> None:
        begin.wait()
        try:
            with torch.no_grad():
                for turn in range(100):
                    batch = turn % len(batches)
                    output = model(models.Batch(batches[batch]))
                    models.assert_same_bits(models.flatten(output), expected[batch])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_threads_look_up_quantized_tables(kind: str) -> None:
    run(2, call_quantized, kind)


@pytest.mark.usefixtures("short_turns")
def test_first_batches_of_threads_are_all_accepted() -> None:
    tables = models.EBC.module().embedding_bag_configs()
    ids = models.make_ids(models.EBC, 0, 3)
    failures: list[Exception] = []
    for _ in range(300):
        check, begin = InputCheck("m", tables, False, "refuse"), threading.Barrier(4)

        def accept(check: InputCheck = check, begin: threading.Barrier = begin) -> None:
            begin.wait()
            try:
                for _ in range(3):
                    assert sum(check.check(ids).counts) == ids.values().numel()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=accept) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


@pytest.mark.usefixtures("short_turns")
def test_replaced_ids_of_threads_are_all_counted() -> None:
    check = InputCheck("m", models.EBC.module().embedding_bag_configs(), False, "row0")
    bad = models.make_ids(models.EBC, 0, 3)
    bad.values()[0] = -1
    with pytest.warns(UserWarning, match="looked up as row 0"):
        check.check(bad)

    def replace() -> None:
        for _ in range(500):
            check.check(bad)

    threads = [threading.Thread(target=replace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert check.replaced_ids == 2001
