"""All-reduces over the backend `bls`: in the order of ranks, with one set of bits everywhere."""

import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSOptions

OPERATIONS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN")}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
# None, less than one a rank, one exchange, one segment, several with a small last one.
SIZES = (0, 1, 5, 1000, 4097, 30_001, 300_007)


@dataclass(frozen=True)
class Case:
    """One all-reduce.

    Attributes:
        layout: "whole", "offset" by one element in its storage, or every "second" element of one.
    """

    dtype: torch.dtype
    operation: str
    size: int
    seed: int
    layout: str = "whole"

    def terms(self, rank: int) -> torch.Tensor:
        """What a rank adds, of many magnitudes, so that each order of additions has other bits."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        if not self.dtype.is_floating_point:
            limits = torch.iinfo(self.dtype)
            return torch.randint(
                limits.min, limits.max, (self.size,), generator=generator, dtype=self.dtype
            )
        exponents = torch.randint(-12, 6, (self.size,), generator=generator)
        numbers = torch.randn(self.size, generator=generator, dtype=torch.float64)
        return (numbers * 2.0**exponents).to(self.dtype)

    def given(self, rank: int) -> torch.Tensor:
        """The same in memory of the layout."""
        terms = self.terms(rank)
        if self.layout == "whole":
            return terms
        if self.layout == "offset":
            return torch.cat([terms.new_zeros(1), terms])[1:]
        return torch.stack([terms, terms], dim=1)[:, 0]

    def expected(self, ranks: int) -> torch.Tensor:
        """By the rules of docs/design/all-reduce.md, with numpy but for bfloat16."""
        terms = [self.terms(rank) for rank in range(ranks)]
        if self.operation in ("MAX", "MIN"):
            combine = torch.maximum if self.operation == "MAX" else torch.minimum
            result = terms[0]
            for term in terms[1:]:
                result = combine(result, term)
            return result
        wide = {torch.float32: np.float64, torch.float16: np.float32, torch.bfloat16: np.float32}
        numbers = [
            (term.float() if term.dtype == torch.bfloat16 else term).numpy() for term in terms
        ]
        total = numbers[0].astype(wide.get(self.dtype, numbers[0].dtype))
        with np.errstate(over="ignore"):
            for number in numbers[1:]:
                total = total + number.astype(total.dtype)
        if self.operation == "AVG":
            total = total / total.dtype.type(ranks)
        return torch.from_numpy(total).to(self.dtype)


def bits(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.view(torch.uint8).numpy().tobytes()


def new_group(**options: Any) -> Any:
    return dist.new_group(backend="bls", pg_options=BLSOptions(deadline=50, **options))


def check(rank: int, cases: list[Case]) -> int:
    group, ranks = new_group(), dist.get_world_size()
    for case in cases:
        expected = case.expected(ranks)
        for _ in range(2):  # in slots that were used otherwise before
            found = case.given(rank)
            dist.all_reduce(found, OPERATIONS[case.operation], group=group)
            # -0.0 and 0.0 are one largest and one smallest number.
            if case.operation in ("MAX", "MIN"):
                assert torch.equal(found, expected), case
            else:
                assert bits(found) == bits(expected), case
    channel = group.all_reduce_channel
    assert channel.stats().pulled_messages == 0
    messages: int = channel.stats().messages
    return messages


EACH = [
    Case(dtype, operation, size, seed)
    for seed, (dtype, operation, size) in enumerate(
        (dtype, operation, size)
        for dtype in (*FLOATS, *INTEGERS)
        for operation in OPERATIONS
        for size in SIZES
        if dtype.is_floating_point or operation != "AVG"
    )
]


@pytest.mark.parametrize("ranks", slow_but([2, 3], [1, 2, 3, 4, 8]))
def test_results_are_those_of_numpy_in_the_order_of_ranks(ranks: int) -> None:
    for messages in run(ranks, check, EACH, deadline=200):
        assert messages > 0 or ranks == 1


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # ranks that differ would not shrink alike
)
@given(
    st.integers(2, 4),
    st.lists(
        st.builds(
            Case,
            dtype=st.sampled_from(FLOATS),
            operation=st.sampled_from(list(OPERATIONS)),
            size=st.integers(0, 100_000),
            seed=st.integers(0, 2**20),
            layout=st.sampled_from(["whole", "offset", "second"]),
        ),
        min_size=10,
        max_size=20,
    ),
)
def test_any_sizes_and_layouts(ranks: int, cases: list[Case]) -> None:
    run(ranks, check, cases)


def compare_errors(rank: int) -> tuple[float, float]:
    gloo, bls, ranks = dist.new_group(backend="gloo"), new_group(), dist.get_world_size()
    of_gloo = of_bls = 0.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = Case(dtype, "SUM", 100_003, seed=5)
        exact = sum((case.terms(each).double() for each in range(ranks)), torch.zeros(()))
        errors = []
        for group in (gloo, bls):
            found = case.terms(rank)
            dist.all_reduce(found, group=group)
            errors.append((found.double() - exact).abs())
        if dtype == torch.float32:
            assert torch.all(errors[1] <= errors[0])
        sums = [float(error.sum()) for error in errors]
        assert sums[1] < sums[0] or ranks == 2, dtype
        of_gloo, of_bls = of_gloo + sums[0], of_bls + sums[1]
    return of_gloo, of_bls


@pytest.mark.parametrize("ranks", slow_but([4], [2, 3, 4, 8]))
def test_errors_are_no_larger_than_gloos(ranks: int) -> None:
    for gloo, bls in run(ranks, compare_errors):
        assert bls <= gloo


def reduce_async(rank: int) -> None:
    group = new_group(bound=2)
    ranks = dist.get_world_size()
    works, sums, moved = [], [], []
    for call in range(6):
        sums.append(torch.full((5000 * call + 1,), float(rank + call)))
        works.append(dist.all_reduce(sums[-1], group=group, async_op=True))
        if call % 2:  # all-to-alls stand in nobody's way
            moved.append(torch.empty(ranks))
            sent = torch.full((ranks,), float(rank))
            works.append(dist.all_to_all_single(moved[-1], sent, group=group, async_op=True))
    # Behind those that are under way.
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [ranks] * 3
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    for call, tensor in enumerate(sums):
        expected = sum(each + call for each in range(ranks))
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    assert all(torch.equal(each, torch.arange(float(ranks))) for each in moved)


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
def test_calls_under_way_are_done_in_their_order(ranks: int) -> None:
    run(ranks, reduce_async)


def use_futures(rank: int) -> None:
    group = new_group()
    tensors = [torch.full((size,), 1.0 + rank) for size in (3, 100_000)]
    futures = [
        dist.all_reduce(tensor, group=group, async_op=True)
        .get_future()
        .then(lambda done: done.value()[0] * 2)
        for tensor in tensors
    ]
    for future, tensor in zip(reversed(futures), reversed(tensors), strict=True):
        assert torch.equal(future.wait(), torch.full_like(tensor, 6.0))
    work = dist.all_reduce(tensors[0], group=group, async_op=True)
    work.wait()
    assert work.get_future() is work.get_future()
    assert torch.equal(work.get_future().value()[0], tensors[0])
    assert work.result()[0] is tensors[0]
    summed = functional.all_reduce(torch.ones(4), "sum", group)
    assert (summed + 0).tolist() == [2.0] * 4


def test_futures_and_functional_collectives() -> None:
    run(2, use_futures)


def let_go(rank: int) -> None:
    group = new_group()
    for is_async in (False, True):
        tensor = torch.ones(10)
        kept = weakref.ref(tensor)
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        if work is not None:
            work.wait()
        del tensor, work
        while kept() is not None:  # the thread may be about to
            time.sleep(0.01)


def test_nothing_keeps_a_tensor_that_is_reduced() -> None:
    run(2, let_go)


def leave_to_gloo(rank: int) -> None:
    group = new_group()
    for tensor, operation, expected in [
        (torch.tensor([2.0 + rank]), dist.ReduceOp.PRODUCT, 6.0),
        (torch.tensor([2 + rank], dtype=torch.int8), dist.ReduceOp.SUM, 5),
        (torch.tensor([2 + rank]), dist.ReduceOp.BOR, 3),
    ]:
        dist.all_reduce(tensor, operation, group=group)
        assert tensor.item() == expected
    with pytest.raises((RuntimeError, ValueError), match="cast"):
        dist.all_reduce(torch.tensor([1]), dist.ReduceOp.AVG, group=group)
    assert group.all_reduce_channel is None
    over_tcp = new_group(transport="tcp")
    number = torch.ones(1)
    dist.all_reduce(number, group=over_tcp)
    assert number.item() == 2 and over_tcp.all_reduce_channel is None


def test_other_reductions_dtypes_and_transports_are_left_to_gloo() -> None:
    run(2, leave_to_gloo)


def reduce_parameters(rank: int) -> None:
    group = new_group()
    for layout in (torch.contiguous_format, torch.channels_last):
        weights = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=layout)
        parameter = nn.Parameter(weights + rank)
        dist.all_reduce(parameter, group=group)
        assert torch.equal(parameter.detach(), 2 * weights + 1)


def test_parameters_of_any_layout() -> None:
    run(2, reduce_parameters)


def meet_from_two_hosts(rank: int) -> None:
    from torchrec_bls.collective.backend import process_group

    process_group.host_identity = lambda: f"host {rank}"  # type: ignore[attr-defined]
    group = new_group()
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number.item() == 2 and group.all_reduce_channel is None


def test_ranks_of_several_hosts_are_left_to_gloo() -> None:
    run(2, meet_from_two_hosts)


def train(rank: int, backend: str) -> list[torch.Tensor]:
    """Gradients of three steps, the second of which are added up over two batches."""
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(30, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 1))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.1)
    gradients = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        model.zero_grad()
        if step == 1:
            with model.no_sync():
                model(torch.rand(8, 30, generator=generator)).sum().backward()
        model(torch.rand(8, 30, generator=generator)).sum().backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if backend == "bls":
        assert group.all_reduce_channel.stats().messages > 0  # type: ignore[attr-defined]
    return gradients


def train_over_both(rank: int) -> list[bytes]:
    over_gloo, over_bls = train(rank, "gloo"), train(rank, "bls")
    for expected, found in zip(over_gloo, over_bls, strict=True):
        if dist.get_world_size() == 2:  # two terms have one sum
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected)
    return [bits(gradient) for gradient in over_bls]


@pytest.mark.parametrize("ranks", slow_but([2, 3], [2, 3, 4]))
def test_data_parallel_gradients_are_the_same_on_all_ranks_and_in_all_runs(ranks: int) -> None:
    first, again = (run(ranks, train_over_both) for _ in range(2))
    assert all(gradients == first[0] for gradients in first + again)
