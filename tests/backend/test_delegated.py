"""Over the backend `bls` all functions of torch.distributed but all-to-alls give what gloo does.

Sums of all-reduces are exact here; what they are elsewhere is in test_all_reduce.py.
"""

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_autograd
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.processes import run
from torchrec_bls.collective.backend.process_group import BLSProcessGroup

Group = dist.ProcessGroup
Case = Callable[[Group], Any]
CASES: dict[str, Case] = {}
# What is not a collective over a given group, or is tested elsewhere.
ELSEWHERE = {
    "all_to_all": "test_all_to_all.py",
    "all_to_all_single": "test_all_to_all.py",
    "destroy_process_group": "test_groups.py",
    "init_process_group": "every test",
    "monitored_barrier": "test_a_monitored_barrier",
    "split_group": "needs an accelerator",
    "shrink_group": "NCCL's alone",
}
ADDS_NOTHING = {"get_backend", "get_backend_config"}  # says the backend's name


def case(*covers: str) -> Callable[[Case], Case]:
    """Registers a function that returns the same over every backend."""

    def register(function: Case) -> Case:
        CASES.update(dict.fromkeys(covers or [function.__name__], function))
        return function

    return register


def newest(module: Any, *names: str) -> Any:
    """Returns the first of `names` that this torch's `module` has: 2.13 has renamed some."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def numbers(group: Group, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * group.rank()


def ends(group: Group) -> tuple[int, int]:
    """Global numbers of the first and the last rank of a group."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[0], ranks[-1]


@case()
def broadcast(group: Group) -> Any:
    tensor = numbers(group, 3)
    work = dist.broadcast(tensor, ends(group)[1], group=group, async_op=True)
    work.wait()
    return tensor, work.is_completed(), work.get_future().done()


@case()
def all_reduce(group: Group) -> Any:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = numbers(group, 2, 2)
        dist.all_reduce(tensor, op, group=group)
        results.append(tensor)
    return results


@case()
def all_reduce_coalesced(group: Group) -> Any:
    tensors = [numbers(group, 2), numbers(group, 3)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@case()
def reduce(group: Group) -> Any:
    tensor = numbers(group, 3)
    dist.reduce(tensor, ends(group)[1], group=group)
    return tensor if group.rank() == group.size() - 1 else None


@case()
def all_gather(group: Group) -> Any:
    tensors = [torch.empty(3) for _ in range(group.size())]
    dist.all_gather(tensors, numbers(group, 3), group=group)
    return tensors


@case()
def all_gather_coalesced(group: Group) -> Any:
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(group.size())]
    dist.all_gather_coalesced(lists, [numbers(group, 2), numbers(group, 3)], group=group)
    return lists


@case("all_gather_into_tensor", "all_gather_single")
def all_gather_into_tensor(group: Group) -> Any:
    results = []
    renamed = newest(distributed_c10d, "all_gather_single", "all_gather_into_tensor")
    for function in (dist.all_gather_into_tensor, renamed):
        tensor = torch.empty(2 * group.size())
        function(tensor, numbers(group, 2), group=group)
        results.append(tensor)
    return results


@case()
def gather(group: Group) -> Any:
    first, _ = ends(group)
    tensors = [torch.empty(2) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(numbers(group, 2), tensors, dst=first, group=group)
    return tensors


@case("gather_single", "gather_into_tensor")
def gather_single(group: Group) -> Any:
    results = []
    for name in ("gather_single", "gather_into_tensor"):
        if function := getattr(distributed_c10d, name, None):  # from torch 2.14 on
            tensor = torch.zeros(2 * group.size()) if group.rank() == 0 else None
            try:
                function(numbers(group, 2), tensor, dst=ends(group)[0], group=group)
            except RuntimeError as refused:  # gloo 2.14 does not have it
                results.append(str(refused))
            else:
                results.append(tensor)
    return results


@case()
def scatter(group: Group) -> Any:
    _, last = ends(group)
    tensor = torch.empty(2)
    tensors = list(numbers(group, group.size(), 2)) if group.rank() == group.size() - 1 else None
    dist.scatter(tensor, tensors, src=last, group=group)
    return tensor


@case()
def reduce_scatter(group: Group) -> Any:
    tensor = torch.empty(2)
    dist.reduce_scatter(tensor, list(numbers(group, group.size(), 2)), group=group)
    return tensor


@case("reduce_scatter_tensor", "reduce_scatter_single")
def reduce_scatter_tensor(group: Group) -> Any:
    results = []
    renamed = newest(distributed_c10d, "reduce_scatter_single", "reduce_scatter_tensor")
    for function in (dist.reduce_scatter_tensor, renamed):
        tensor = torch.empty(2)
        function(tensor, numbers(group, 2 * group.size()), group=group)
        results.append(tensor)
    return results


@case()
def coalescing_manager(group: Group) -> Any:
    tensors = [torch.empty(2 * group.size()) for _ in range(2)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_gather_into_tensor(tensor, numbers(group, 2), group=group)
    return tensors


@case("send", "recv")
def send(group: Group) -> Any:
    first, last = ends(group)
    tensor = numbers(group, 3)
    if group.rank() == 0:
        dist.send(tensor, last, group=group, tag=3)
        return None
    if group.rank() == group.size() - 1:
        return dist.recv(tensor, first, group=group, tag=3), tensor
    return None


@case()
def receive_from_any(group: Group) -> Any:
    first, _ = ends(group)
    tensor = numbers(group, 3)
    if group.rank() == 0:
        return dist.recv(tensor, group=group), tensor
    if group.rank() == group.size() - 1:
        dist.send(tensor, first, group=group)
    return None


@case("isend", "irecv")
def isend(group: Group) -> Any:
    ranks = dist.get_process_group_ranks(group)
    right, left = (ranks[(group.rank() + step) % group.size()] for step in (1, -1))
    tensor = torch.empty(3)
    works = [
        dist.isend(numbers(group, 3), right, group=group),
        dist.irecv(tensor, left, group=group),
    ]
    for work in works:
        work.wait()
    return tensor


@case()
def batch_isend_irecv(group: Group) -> Any:
    ranks = dist.get_process_group_ranks(group)
    right, left = (ranks[(group.rank() + step) % group.size()] for step in (1, -1))
    tensor = torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, numbers(group, 3), right, group),
        dist.P2POp(dist.irecv, tensor, left, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


@case()
def barrier(group: Group) -> Any:
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()


@case()
def all_gather_object(group: Group) -> Any:
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, {"rank": group.rank()}, group=group)
    return objects


@case()
def broadcast_object_list(group: Group) -> Any:
    objects = [group.rank(), "text"]
    dist.broadcast_object_list(objects, ends(group)[1], group=group)
    return objects


@case()
def gather_object(group: Group) -> Any:
    objects = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(group.rank(), objects, ends(group)[0], group=group)
    return objects


@case()
def scatter_object_list(group: Group) -> Any:
    received: list[Any] = [None]
    objects = [{"for": rank} for rank in range(group.size())]
    dist.scatter_object_list(received, objects, ends(group)[0], group=group)
    return received


@case("send_object_list", "recv_object_list")
def send_object_list(group: Group) -> Any:
    first, last = ends(group)
    objects = [group.rank()]
    if group.rank() == 0:
        dist.send_object_list(objects, last, group=group)
    elif group.rank() == group.size() - 1:
        dist.recv_object_list(objects, first, group=group)
    return objects


@case("get_rank", "get_world_size", "get_group_rank", "get_global_rank", "get_process_group_ranks")
def ranks_of_the_group(group: Group) -> Any:
    ranks = dist.get_process_group_ranks(group)
    return (
        ranks,
        dist.get_rank(group),
        dist.get_world_size(group),
        [dist.get_group_rank(group, rank) for rank in ranks],
        [dist.get_global_rank(group, rank) for rank in range(group.size())],
    )


@case()
def functional_collectives(group: Group) -> Any:
    size = group.size()
    tensor = numbers(group, 2 * size)
    coalesced = [numbers(group, 2), numbers(group, 3)]
    gather = newest(functional, "all_gather_single", "all_gather_tensor")
    scatter = newest(functional, "reduce_scatter_single", "reduce_scatter_tensor")
    gather_several = newest(
        functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
    )
    scatter_several = newest(
        functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )
    results = [
        functional.all_reduce(tensor, "sum", group),
        functional.broadcast(tensor, 0, group),
        gather(tensor, 0, group),
        scatter(tensor, "sum", 0, group),
        functional.all_to_all_single(tensor, None, None, group),
        functional.permute_tensor(tensor, [*range(1, size), 0], group),
        *functional.all_reduce_coalesced(coalesced, "sum", group),
        *gather_several(coalesced, group),
        *scatter_several([tensor, tensor], "sum", [0, 0], group),
    ]
    return [result + 0 for result in results]  # the sum waits


@case()
def gradients(group: Group) -> Any:
    def results_of(parameter: torch.Tensor) -> list[torch.Tensor]:
        rows = list(parameter.split(2))
        return [
            with_autograd.broadcast(parameter, ends(group)[0], group),
            *with_autograd.gather(parameter, ends(group)[0], group),
            with_autograd.scatter(rows, ends(group)[0], group),
            with_autograd.reduce(parameter, ends(group)[0], group=group),
            with_autograd.reduce_scatter(torch.empty(2, 2), rows, group=group),
            *with_autograd.all_gather(parameter, group),
            with_autograd.all_reduce(parameter, group=group),
        ]

    parameter = numbers(group, 2 * group.size(), 2).requires_grad_()
    results = results_of(parameter)
    sum(result.square().sum() for result in results).backward()
    # gloo's `gather` and `reduce` leave what other ranks get undefined.
    return parameter.grad if group.rank() == 0 else None


@case()
def sequence_numbers(group: Group) -> Any:
    return group._get_sequence_number_for_group() >= 0


@case("timeouts", "set_timeout", "get_backend_impl")
def timeouts(group: Group) -> Any:
    cpu = torch.device("cpu")
    # The public names are there from torch 2.14 on.
    set_timeout = getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)
    implementation = getattr(dist, "get_backend_impl", Group._get_backend)(group, cpu)
    set_timeout(timedelta(seconds=77), group)
    return type(implementation).__name__, implementation.options._timeout


@case("new_group", "new_subgroups", "new_subgroups_by_enumeration")
def subgroups(group: Group) -> Any:
    backend = dist.get_backend(group)
    results = []
    pairs = [list(range(i, i + 2)) for i in range(0, dist.get_world_size(), 2)]
    for sub in (
        dist.new_group(backend=backend),
        dist.new_subgroups(2, backend=backend)[0],
        dist.new_subgroups_by_enumeration(pairs, backend=backend)[0],
    ):
        assert dist.get_backend(sub) == backend
        received = torch.empty(2 * sub.size())
        dist.all_to_all_single(received, numbers(sub, 2 * sub.size()), group=sub)
        results.append(received)
        dist.all_reduce(received, group=sub)
        results.append(received)
    return results


# The first makes groups; torch's gradients of `gather` take ranks of the group for global ones.
OF_ALL_RANKS = (subgroups, gradients)


def plain(value: Any) -> Any:
    """`value` as something that == compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().view(torch.uint8).tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def compare(name: str, function: Case, gloo: Group, bls: Group) -> None:
    expected, found = (plain(function(group)) for group in (gloo, bls))
    assert found == expected, name


def compare_with_gloo(rank: int) -> None:
    worlds = [dist.new_group(backend=name) for name in ("gloo", "bls")]
    # Over all ranks but the first, so that ranks of the group and of the world differ.
    others = [dist.new_group([1, 2, 3], backend=name) for name in ("gloo", "bls")]
    for name, function in CASES.items():
        if function in OF_ALL_RANKS:
            compare(name, function, *worlds)
        elif rank > 0:
            compare(name, function, *others)


def test_results_are_those_of_gloo() -> None:
    run(4, compare_with_gloo, deadline=120)


def test_every_function_of_torch_is_tested() -> None:
    functions = {
        name
        for name in distributed_c10d.__all__
        if inspect.isfunction(function := getattr(distributed_c10d, name))
        and any("group" in parameter for parameter in inspect.signature(function).parameters)
    }
    assert functions - CASES.keys() - ELSEWHERE.keys() - ADDS_NOTHING == set()


def use_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == "cpu:bls"
        received = torch.empty(2)
        dist.all_to_all_single(received, torch.full((2,), float(rank)), group=group)
        assert received.tolist() == dist.get_process_group_ranks(group)


def test_the_groups_of_a_mesh() -> None:
    run(4, use_a_mesh, backend="cpu:bls")


def wait_at_a_monitored_barrier(rank: int) -> None:
    half_a_minute = timedelta(seconds=30)
    try:
        dist.monitored_barrier(timeout=half_a_minute)
    except ValueError as refused:  # torch went by the backend's name up to 2.13
        assert "only implemented for GLOO" in str(refused)
    dist.group.WORLD.monitored_barrier(timeout=half_a_minute)


def test_a_monitored_barrier() -> None:
    run(2, wait_at_a_monitored_barrier, backend="cpu:bls")


def overridable() -> set[str]:
    """Returns the names that torch calls a Python group's own functions by, from torch's header."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    (header,) = folder.rglob("PyProcessGroup.hpp")  # torch 2.14 has moved it into a folder py
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    by_macro = re.findall(r"WORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text)
    by_hand = re.findall(r'static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', text)
    return {*by_macro, *by_hand}


def test_nothing_that_python_may_override_is_left_to_the_base_class() -> None:
    # The base's own would run with the GIL held, and now and then wait for gloo's threads forever.
    names = overridable()
    assert {"allgather", "send", "alltoall_base"} <= names
    assert names <= vars(BLSProcessGroup).keys()
