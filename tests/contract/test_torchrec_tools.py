"""What is used of TorchRec's tensors, awaitables and pipelines, seam by seam."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import comm_ops
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
)
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.train_pipeline.utils import (
    _fuse_input_dist_splits,
    _override_input_dist_forwards,
    _rewrite_model,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule

from tests.distributed import models
from tests.distributed.dlrm import make_batch, make_dlrm
from tests.processes import run


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_a_keyed_jagged_tensor_takes_its_sums() -> None:
    ids = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        weights=None,
        lengths=torch.tensor([1, 0, 1, 1], dtype=torch.int32),
        stride=2,
        length_per_key=[1, 2],
        offset_per_key=[0, 1, 3],
    )
    assert (ids.stride(), ids.variable_stride_per_key()) == (2, False)
    assert (ids.length_per_key(), ids.offset_per_key()) == ([1, 2], [0, 1, 3])
    assert ids.weights_or_none() is None


def test_awaitables_call_back_in_order_and_lazy_ones_wait_when_used() -> None:
    class Now(Awaitable[int]):
        def _wait_impl(self) -> int:
            return 3

    class Lazy(LazyAwaitable[torch.Tensor]):
        def _wait_impl(self) -> torch.Tensor:
            return torch.ones(2)

    now = Now()
    now.callbacks.extend([lambda value: value + 1, lambda value: value * 2])
    assert now.wait() == 8
    assert torch.add(Lazy(), 1).tolist() == [2, 2]


@pytest.mark.parametrize("divide", [True, False])
def test_gradient_division_is_a_switch(divide: bool) -> None:
    before = comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(divide)
    assert comm_ops.get_gradient_division() is divide
    comm_ops.set_gradient_division(before)


def test_stages_of_a_sharded_module() -> None:
    assert parameters_of(ShardedModule.input_dist)[:2] == ["self", "ctx"]
    assert parameters_of(ShardedModule.compute_and_output_dist) == ["self", "ctx", "input"]
    assert parameters_of(ShardedModule.create_context) == ["self"]
    assert parameters_of(ShardedModule.preprocess_input)[:1] == ["self"]


def test_a_pipelined_forward_is_made_of_name_arguments_and_module() -> None:
    assert parameters_of(BaseForward.__init__) == [
        "self",
        "name",
        "args",
        "module",
        "context",
        "stream",
    ]
    module, args = object(), object()
    forward = BaseForward("a", args, module, TrainPipelineContext(), None)
    assert (forward.name, forward._name) == ("a", "a")
    assert forward._args is args and forward._module is module


def test_a_pipeline_is_its_progress() -> None:
    assert TrainPipeline.__abstractmethods__ == {"progress"}
    assert parameters_of(TrainPipeline.progress) == ["self", "dataloader_iter"]


def rewrite_a_dlrm(rank: int) -> None:
    assert parameters_of(_rewrite_model)[:4] == ["model", "context", "dist_stream", "batch"]
    assert "pipelined_forward" in parameters_of(_rewrite_model)
    made: list[tuple[str, Any]] = []

    class Forward(BaseForward[TrainPipelineContext]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append((self._name, self._module))

        def __call__(self, *_: Any) -> str:
            return "in place of the embeddings"

    model = make_dlrm(EmbeddingBagCollectionSharder())
    batch = make_batch(rank, 0)
    name = "model.sparse_arch.embedding_bag_collection"
    module = model.module.get_submodule(name)
    original = module.forward
    modules, same_model, originals, _, left_out = _rewrite_model(
        model, TrainPipelineContext(), None, batch, pipelined_forward=Forward
    )
    assert (modules, left_out, same_model) == ([module], [], model)
    assert made == [(name, module)] and originals == [original]
    assert module(batch.sparse_features) == "in place of the embeddings"
    args, kwargs = module.forward._args.build_args_kwargs(batch)
    assert (len(args), kwargs) == (1, {}) and args[0] is batch.sparse_features


def test_a_model_is_rewritten_module_by_module() -> None:
    run(2, rewrite_a_dlrm)


class Changing(models.SparseOnly):
    def forward(self, batch: models.Batch) -> Any:
        return self.embeddings(batch.ids.permute([4, 3, 2, 1, 0]))


class Twice(models.SparseOnly):
    def forward(self, batch: models.Batch) -> Any:
        return self.embeddings(batch.ids), self.embeddings(batch.ids)


def rewrite_odd_models(rank: int) -> list[tuple[int, list[str]]]:
    found = []
    for model in (Changing, Twice):
        module, sharder = models.EBC.module(), models.EBC.torchrec_sharder()
        plan = models.make_plan(module, ["table_wise"] * models.EBC.tables, sharder)
        sharded = models.shard_model(model(module), {"embeddings": plan}, [sharder])
        modules, *_, left_out = _rewrite_model(
            sharded, TrainPipelineContext(), None, None, pipelined_forward=BaseForward
        )
        found.append((len(modules), left_out))
    return found


def test_changed_inputs_are_left_out_and_repeated_calls_are_repeated() -> None:
    assert run(2, rewrite_odd_models) == [[(0, ["embeddings"]), (2, [])]] * 2


def test_pipelines_replace_the_forward_of_an_all_to_all() -> None:
    # Which BoundedLagIdsDist ignores; it is asked for the class first.
    class AllToAll(KJTAllToAll):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self._pg, self._splits, self._stagger = None, [], 1

    inner = AllToAll()
    owner = SimpleNamespace(
        _input_dists=[SimpleNamespace(_dist=inner)], _has_uninitialized_input_dist=False
    )
    module = SimpleNamespace(named_modules=lambda: [("", owner)])
    _override_input_dist_forwards([module])
    assert "forward" in vars(inner)


class Ids(Awaitable):  # type: ignore[misc]
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def _wait_impl(self) -> Any:
        return self._result


def test_pipelines_take_awaitables_that_need_no_splits() -> None:
    module_ids = KeyedJaggedTensor(["f"], torch.tensor([7]), None, torch.tensor([1]))
    context = EmbeddingBagCollectionContext(sharding_contexts=[SimpleNamespace()])
    request = KJTListSplitsAwaitable([Ids(Ids(module_ids))], ctx=None)
    pipeline = TrainPipelineContext(
        input_dist_splits_requests={"module": request},
        module_contexts={"module": context},
        version=1,
    )
    _fuse_input_dist_splits(pipeline)
    [(names, fused)] = pipeline.fused_splits_awaitables
    [tensors] = fused.wait()
    [arrived] = tensors.wait()
    assert names == ["module"] and arrived is module_ids
