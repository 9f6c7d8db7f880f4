"""Sharded models whose tables a GPU reads, against those that the CPU reads.

    TRITON_INTERPRET=1 python -m tests.gpu.sharded CHECK...

Where there is no GPU, a fake one reads by Triton's interpreter. This is chosen when kernels are
decorated, hence a process of its own, of which ranks get the environment.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.streamable import Multistreamable
from torchrec_bls.sharding import BLSShardingPlanner

from tests.direct import served
from tests.distributed import models
from tests.distributed.inputs.test_variable_batch import in_full, make_variable
from tests.distributed.test_direct_reads import outputs, wait_until_gone
from tests.gpu.fake_cuda import FakeGpu
from tests.processes import run, run_outcomes
from tests.quant import models as quant_models
from tests.quant import served as quant_served
from torchrec_bls import BLSConfig, BoundedLagPipeline, CodecConfig, publish
from torchrec_bls.direct.gpu import device as devices
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import LazyJaggedTensor
from torchrec_bls.errors import RendezvousError

GPU = torch.device("cuda", 0)
IS_FAKE = not torch.cuda.is_available()
DIRECT = BLSConfig(lookup="direct", deadline=30.0)
AUTO = BLSConfig(lookup="auto", deadline=30.0)
EXCHANGE = BLSConfig(deadline=30.0)
LAGGING = BLSConfig(bound=2, deadline=30.0)
CODED = BLSConfig(codecs=CodecConfig(forward="uint4"), deadline=30.0)


def gpu_here(failing: Collection[tuple[str, int]] = ()) -> Any:
    """Returns the GPU of this process, a fake one if there is no other."""
    if IS_FAKE:
        from tests.gpu import interpreter

        interpreter.prepare()
        devices._gpus[0] = FakeGpu(failing)
    return devices.gpu_of(GPU)


def sharded(kind: models.Kind, sharding: str, device: torch.device) -> DistributedModelParallel:
    return models.shard(kind, sharding, kind.bls_sharder(DIRECT), device=device)


def beside(flat: dict[str, torch.Tensor], gpu: Any) -> dict[str, torch.Tensor]:
    """Returns outputs of a GPU on the host."""
    assert all(tensor.device == gpu.device for tensor in flat.values())
    return {name: tensor.cpu() for name, tensor in flat.items()}


def batches_of(kind: models.Kind, rank: int) -> Sequence[Any]:
    ids = models.make_ids
    return [
        ids(kind, rank, 4),
        ids(kind, rank + 10, 3, dtype=torch.int32),
        ids(kind, rank + 20, 2, without=kind.features),
        ids(kind, 0, 0),
        ids(kind, rank + 30, 5),
    ]


def hide(batch: Any, gpu: Any) -> None:
    """Makes a fake GPU unable to read a batch of the host."""
    if IS_FAKE:
        tensors = [batch.values(), batch.lengths(), batch.offsets(), batch.weights_or_none()]
        gpu.of_host = {each.data_ptr() for each in tensors if each is not None}


def give_the_bits(rank: int, kind: models.Kind, sharding: str) -> None:
    gpu = gpu_here()
    batches = batches_of(kind, rank)
    by_the_cpu = outputs(sharded(kind, sharding, models.CPU), *batches)
    by_gpu = sharded(kind, sharding, GPU)
    for batch, expected in zip(batches, by_the_cpu, strict=True):
        hide(batch, gpu)
        [found] = outputs(by_gpu, batch)
        models.assert_same_bits(beside(found, gpu), expected)
    if IS_FAKE:
        assert gpu.cuda.trace.count("read") == len(batches)
    for name, tensor in by_gpu.state_dict().items():
        shards = tensor.local_shards()
        assert all(shard.tensor.device == models.CPU for shard in shards), name
        for shard in tensor.metadata().shards_metadata:
            assert shard.placement.device() == models.CPU, name
    by_gpu.load_state_dict(by_gpu.state_dict())
    moved = by_gpu.to(gpu.device if not IS_FAKE else torch.device("meta"))
    assert all(parameter.device == models.CPU for parameter in moved.parameters())


def bits() -> None:
    for kind in (models.EC, models.EBC, models.WEIGHTED):
        run(2, give_the_bits, kind, "mixed", deadline=300)


def bits_of_means_by_rows() -> None:
    run(2, give_the_bits, models.EBC, "row_wise", deadline=300)


def give_the_bits_of_sizes_per_key(rank: int, kind: models.Kind) -> None:
    gpu = gpu_here()
    batch = make_variable(kind, rank, [1, 2, 3, 2, 4], 5)
    [expected] = outputs(sharded(kind, "mixed", models.CPU), batch)
    model = sharded(kind, "mixed", GPU)
    hide(batch, gpu)
    models.assert_same_bits(beside(outputs(model, batch)[0], gpu), expected)


def bits_of_sizes_per_key() -> None:
    for kind in (models.EC, models.EBC):
        run(2, give_the_bits_of_sizes_per_key, kind, deadline=300)


def give_the_bits_of_stored_rows(rank: int, kind: str, types: Sequence[str], output: Any) -> None:
    gpu = gpu_here()
    model = quant_models.model_of(kind, types, output)
    unsharded = copy.deepcopy(model)
    sharder = quant_models.sharder_of(kind, DIRECT)
    by_gpu = quant_models.shard(model, sharder, "mixed", GPU)
    ids = quant_models.make_ids
    batches = [
        ids(kind, rank, 5),
        ids(kind, rank + 10, 3, dtype=torch.int32),
        ids(kind, rank + 20, 0),
        ids(kind, rank + 30, 2, most_ids=0),
    ]
    drawn = models.Kind(kind, len(quant_models.ROWS))
    varying = make_variable(drawn, rank, [3, 1, 4, 2], 5)
    varying.values().remainder_(min(quant_models.ROWS))
    for batch, whole in [*zip(batches, batches, strict=True), (varying, in_full(drawn, varying))]:
        hide(batch, gpu)
        [found], [expected] = outputs(by_gpu, batch), outputs(unsharded, whole)
        models.assert_same_bits(beside(found, gpu), expected)
    assert not IS_FAKE or "read" in gpu.cuda.trace
    assert all(tensor.device == models.CPU for tensor in by_gpu.state_dict().values())


def bits_of_stored_rows() -> None:
    mixed, full = ["int8", "int4", "int2", "fp16"], torch.float32
    for kind, types, output in (
        ("ebc", mixed, full),
        ("weighted", mixed, torch.float16),
        ("ec", [*mixed[:3], "fp32"], full),
    ):
        run(2, give_the_bits_of_stored_rows, kind, types, output, deadline=300)


def refuse(rank: int) -> None:
    gpu_here()
    good, bad = models.make_ids(models.EBC, 1, 4), models.make_ids(models.EBC, 1, 4)
    bad.values()[3] = 10**6
    model = sharded(models.EBC, "mixed", GPU)
    [expected] = outputs(model, good)
    with pytest.raises(ValueError, match="id 1000000 at position 3 of feature 'f0'"):
        outputs(model, bad)
    models.assert_same_bits(outputs(model, good)[0], expected)
    message = r"autograd is on.*and device=torch.device\('cpu'\) to train"
    with pytest.raises(ValueError, match=message):
        model(models.Batch(good))
    kind = models.EBC
    sharder = kind.bls_sharder(DIRECT)
    plan = models.make_plan(kind.module(), models.sharding_types(kind, "mixed", 1), sharder)
    with pytest.raises(ValueError, match="compute kernel fused, but only fused_uvm are possible"):
        models.shard_model(models.SparseOnly(kind.module()), {"embeddings": plan}, [sharder], GPU)
    plan = model.module.embeddings.module_sharding_plan
    with pytest.raises(ValueError, match="shard the model anew"):
        model.module.embeddings.update_shards(dict(plan), model._env, GPU)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ValueError, match="forked this one, where its GPU can't be used"):
                outputs(model, good)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refusals() -> None:
    run(2, refuse, deadline=120)


def tensors_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, KeyedTensor):
        return [output.values()]
    of_all = [[each.values(), each.lengths(), each.weights_or_none()] for each in output.values()]
    return [tensor for each in of_all for tensor in each if tensor is not None]


def copied(output: Any, gpu: Any) -> dict[str, torch.Tensor]:
    """Returns an output that was copied to a GPU, on the host."""
    output = models.arrived(output)
    for tensor in tensors_of(output):
        assert gpu.has_copied(tensor) if IS_FAKE else tensor.device == gpu.device
    return beside(models.flatten(output), gpu)


def give_the_bits_of_copies(rank: int, kind: models.Kind, sharding: str, config: BLSConfig) -> None:
    gpu = gpu_here()
    batches = batches_of(kind, rank)
    if kind != models.WEIGHTED:
        batches = [*batches, make_variable(kind, rank, [1, 2, 3, 2, 4], 5)]
    expected = outputs(models.shard(kind, sharding, kind.bls_sharder(config)), *batches)
    model = models.shard(kind, sharding, kind.bls_sharder(config), device=GPU)
    for batch, theirs in zip(batches, expected, strict=True):
        with torch.no_grad():
            output = model(models.Batch(batch))
        if IS_FAKE:
            gpu.cuda.trace.clear()
            models.arrived(output)
            assert gpu.cuda.trace, "copied before it was waited for"
        models.assert_same_bits(copied(output, gpu), theirs)
    assert not model.module.embeddings.reads_directly
    assert all(parameter.device == models.CPU for parameter in model.to("meta").parameters())


def staged() -> None:
    for kind, sharding, config in (
        (models.EBC, "mixed", EXCHANGE),
        (models.EC, "mixed", LAGGING),
        (models.EC, "row_wise", EXCHANGE),
        (models.WEIGHTED, "table_wise", LAGGING),
        (models.EBC, "row_wise", CODED),
        (models.EC, "table_wise", CODED),
    ):
        run(2, give_the_bits_of_copies, kind, sharding, config, deadline=120)


def give_the_bits_of_stored_copies(rank: int, kind: str, config: BLSConfig) -> None:
    gpu = gpu_here()
    model = quant_models.model_of(kind, ["int8", "int4", "int2", "fp16"])
    unsharded = copy.deepcopy(model)
    made = quant_models.shard(model, quant_models.sharder_of(kind, config), "mixed", GPU)
    for batch in (
        quant_models.make_ids(kind, rank, 5),
        quant_models.make_ids(kind, rank + 20, 0),
        quant_models.make_ids(kind, rank + 10, 3, dtype=torch.int32),
    ):
        [expected] = outputs(unsharded, batch)
        with torch.no_grad():
            models.assert_same_bits(copied(made(models.Batch(batch)), gpu), expected)


def staged_stored_rows() -> None:
    for kind, config in (("ebc", EXCHANGE), ("weighted", LAGGING), ("ec", EXCHANGE)):
        run(2, give_the_bits_of_stored_copies, kind, config, deadline=120)


def copy_once(rank: int) -> None:
    gpu = gpu_here()
    for kind, copies in ((models.WEIGHTED, 1), (models.EC, 2)):
        model = models.shard(kind, "row_wise", kind.bls_sharder(EXCHANGE), device=GPU)
        batch = models.make_ids(kind, rank, 4)
        outputs(model, batch)  # the first one is TorchRec's
        gpu.cuda.trace.clear()
        with torch.no_grad():
            output = models.arrived(model(models.Batch(batch)))
        # Embeddings are born where they are copied from. An EC's lengths are not.
        assert gpu.cuda.trace == ["copy", "copy of a copy"][:copies]
        if kind == models.EC:
            assert all(type(jagged) is LazyJaggedTensor for jagged in output.values())


def copies() -> None:
    if IS_FAKE:
        run(2, copy_once, deadline=120)


def refuse_copies(rank: int) -> None:
    gpu = gpu_here()
    for kind, config in ((models.EBC, EXCHANGE), (models.EC, LAGGING)):
        good, bad = models.make_ids(kind, rank, 4), models.make_ids(kind, rank, 4)
        bad.values()[3] = 10**6
        model = models.shard(kind, "mixed", kind.bls_sharder(config), device=GPU)
        [expected] = outputs(model, good)
        with torch.no_grad():
            if rank == 0:
                with pytest.raises(ValueError, match="id 1000000 at position 3 of feature 'f0'"):
                    models.arrived(model(models.Batch(bad)))
            else:
                models.assert_same_bits(copied(model(models.Batch(good)), gpu), expected)
        with pytest.raises(ValueError, match=r"no gradients come back.*device=torch.device\('cpu"):
            models.arrived(model(models.Batch(good)))
        models.assert_same_bits(outputs(model, good)[0], expected)
    plan = model.module.embeddings.module_sharding_plan
    made = models.shard(models.EBC, "mixed", models.EBC.bls_sharder(EXCHANGE), device=GPU)
    with pytest.raises(ValueError, match="shard the model anew"):
        made.module.embeddings.update_shards(dict(plan), made._env, GPU)


def refusals_of_copies() -> None:
    run(2, refuse_copies, deadline=120)


def pipeline(rank: int) -> None:
    gpu = gpu_here()
    for kind in (models.EC, models.EBC):
        batches = batches_of(kind, rank)
        expected = outputs(models.shard(kind, "row_wise", kind.bls_sharder(LAGGING)), *batches)
        model = models.shard(kind, "row_wise", kind.bls_sharder(LAGGING), device=GPU)
        # As TorchRec's pipelines do it on a GPU. Tensors of the host refuse any stream.
        module, stream = model.module.embeddings, torch.Stream(device="cpu")
        with torch.no_grad():
            ctx = module.create_context()
            ids = module.input_dist(ctx, batches[0]).wait().wait()
            ids.record_stream(stream)
            ctx.record_stream(stream)
            output = copied(module.compute_and_output_dist(ctx, ids), gpu)
            models.assert_same_bits(output, expected[0])
        by_gpu = sharded(kind, "row_wise", GPU).module.embeddings
        with torch.no_grad():
            unsent = by_gpu.input_dist(by_gpu.create_context(), batches[0]).wait().wait()
            assert isinstance(unsent, Multistreamable)
            unsent.record_stream(stream)
        found = BoundedLagPipeline(model)
        source = iter(models.Batch(batch) for batch in batches)
        for theirs in expected:
            models.assert_same_bits(copied(found.progress(source), gpu), theirs)


def pipelines() -> None:
    run(2, pipeline, deadline=120)


def fall_back(rank: int, failing: int | None, stored: bool) -> None:
    gpu = gpu_here([] if failing is None or rank == 0 else [("register", failing)])
    ids = quant_models.make_ids("ebc", rank, 4)
    batch = ids if stored else models.make_ids(models.EBC, rank, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if stored:
            model = quant_models.model_of("ebc", ["int8"] * 4)
            [expected] = outputs(copy.deepcopy(model), batch)
            sharder = quant_models.sharder_of("ebc", AUTO)
            model = quant_models.shard(model, sharder, "mixed", GPU)
        else:
            [expected] = outputs(sharded(models.EBC, "mixed", models.CPU), batch)
            model = models.shard(models.EBC, "mixed", models.EBC.bls_sharder(AUTO), device=GPU)
        [found] = outputs(model, batch)
    models.assert_same_bits(beside(found, gpu), expected)
    told = [str(each.message) for each in caught if 'lookup="auto" exchanges' in str(each.message)]
    if failing is None:
        assert model.module.embeddings.reads_directly and not told
        return
    assert not model.module.embeddings.reads_directly
    assert ["rank 1: the driver of CUDA" in text for text in told] == [True] * (rank == 0)
    gc.collect()
    assert not gpu.cuda.registered and not gpu.cuda.latched
    with torch.no_grad():
        models.assert_same_bits(copied(model(models.Batch(batch)), gpu), expected)


def auto_lookups() -> None:
    for stored in (False, True):
        for failing in (None, 0) if IS_FAKE else (None,):
            run(2, fall_back, failing, stored, deadline=120)


def follow(rank: int, stored: bool) -> None:
    gpu, of = gpu_here(), quant_served if stored else served
    batches = of.batches_of(rank, 2)
    expected = of.Expected(batches)
    model = of.sharded(DIRECT, GPU)
    for number in range(1, 5):
        if number > 1:
            publish(model, of.weights_of(number), version=str(number)).wait(30.0)
        for batch in range(len(batches)):
            with torch.no_grad():
                output = beside(model(batches[batch]), gpu)
            models.assert_same_bits(output, expected.of(number, batch))
        dist.barrier()
    if IS_FAKE:
        # The version before may be on its way out.
        assert gpu.cuda.calls["unregister"] >= gpu.cuda.calls["register"] // 4
        del model
        gc.collect()
        assert not gpu.cuda.registered


def versions() -> None:
    run(2, follow, False, deadline=300)


def versions_of_stored_rows() -> None:
    run(2, follow, True, deadline=300)


def outlive_an_owner(rank: int) -> int:
    gpu = gpu_here()
    batches = [models.make_ids(models.EBC, seed, 4) for seed in range(5)]
    expected = outputs(sharded(models.EBC, "mixed", models.CPU), *batches)
    model = sharded(models.EBC, "mixed", GPU)
    outputs(model, batches[0])
    pids: list[int] = [0] * 2
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_gone(pids[1])
    for ours, theirs in zip(outputs(model, *batches), expected, strict=True):
        models.assert_same_bits(beside(ours, gpu), theirs)
    return len(batches)


def a_dead_owner() -> None:
    outcomes = run_outcomes(2, outlive_an_owner, deadline=120)
    assert outcomes[0].value == 5, str(outcomes[0])
    assert outcomes[1].exit_code == -signal.SIGKILL


def fail_to_register(rank: int, failing: int) -> None:
    gpu = gpu_here([("register", failing)] if rank == 1 else [])
    model = sharded(models.EBC, "mixed", GPU)
    batch = models.make_ids(models.EBC, 1, 4)
    with pytest.raises(RendezvousError, match="rank 1: the driver of CUDA") as raised:
        outputs(model, batch)
    assert "cudaHostRegister returned 2" in str(raised.value)
    assert "Look up on the CPU instead" in str(raised.value)
    del raised
    gc.collect()
    assert not gpu.cuda.registered and not gpu.cuda.latched
    outputs(model, batch)  # a failure of the moment costs a try


def failing_registrations() -> None:
    for failing in range(2):
        run(2, fail_to_register, failing, deadline=120)


def by_name(output: Any) -> dict[str, torch.Tensor]:
    """Returns the output of a module, whatever order its tables have."""
    if isinstance(output, dict):
        return {name: ids.values() for name, ids in output.items()}
    named: dict[str, torch.Tensor] = output.to_dict()
    return named


def shard_by_a_plan(planner: Any, model: Any, sharder: Any, kernel: str, batch: Any) -> None:
    gpu = gpu_here()
    # TorchRec would plan replicas of tables as small as these.
    types = ParameterConstraints(sharding_types=["table_wise", "row_wise"])
    plan = planner(
        topology=Topology(world_size=2, compute_device="cuda", local_world_size=2),
        constraints=dict.fromkeys(sharder.shardable_parameters(model.embeddings), types),
    ).collective_plan(model, [sharder], dist.group.WORLD)
    planned = plan.get_plan_for_module("embeddings")
    assert {each.compute_kernel for each in planned.values()} == {kernel}
    unsharded = copy.deepcopy(model)
    made = DistributedModelParallel(
        model, device=GPU, plan=plan, sharders=[sharder], init_data_parallel=False
    )
    with torch.no_grad():
        expected = unsharded(models.Batch(batch))
        found = models.arrived(made(models.Batch(batch)))
    torch.testing.assert_close(beside(by_name(found), gpu), by_name(expected))


def plan_floats(rank: int, planner: Any, kind: models.Kind, config: BLSConfig) -> None:
    model = models.SparseOnly(kind.module())
    batch = models.make_ids(kind, rank, 4)
    shard_by_a_plan(planner, model, kind.bls_sharder(config), "fused_uvm", batch)


def plan_stored_rows(rank: int, kind: str) -> None:
    model = quant_models.model_of(kind, ["int8", "int4", "int8", "int4"])
    sharder, batch = quant_models.sharder_of(kind, DIRECT), quant_models.make_ids(kind, rank, 4)
    shard_by_a_plan(BLSShardingPlanner, model, sharder, "quant_uvm", batch)


def plans_of_torchrec() -> None:
    for config in (DIRECT, EXCHANGE):
        run(2, plan_floats, EmbeddingShardingPlanner, models.EBC, config, deadline=300)


def plans_of_ours() -> None:
    for kind, config in ((models.EBC, DIRECT), (models.EC, DIRECT), (models.EBC, EXCHANGE)):
        run(2, plan_floats, BLSShardingPlanner, kind, config, deadline=300)
    for stored in ("ebc", "ec"):
        run(2, plan_stored_rows, stored, deadline=300)


CHECKS = {
    check.__name__: check
    for check in (
        bits,
        bits_of_means_by_rows,
        bits_of_sizes_per_key,
        bits_of_stored_rows,
        refusals,
        versions,
        versions_of_stored_rows,
        a_dead_owner,
        failing_registrations,
        plans_of_torchrec,
        plans_of_ours,
        staged,
        staged_stored_rows,
        copies,
        refusals_of_copies,
        pipelines,
        auto_lookups,
    )
}


def make(checks: Mapping[str, Callable[[], None]]) -> None:
    """Makes the checks that are named on the command line."""
    for name in sys.argv[1:]:
        checks[name]()
        print(f"{name}: as the CPU")


if __name__ == "__main__":
    make(CHECKS)
