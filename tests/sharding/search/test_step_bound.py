"""The lower bound against the best of all plans, and the sets of plans that it looks at."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import (
    ALL_RANKS,
    ANY_RANKS,
    Problem,
    make_problem,
)
from torchrec_bls.sharding.problem.tables import (
    COLUMN_WISE,
    ROW_WISE,
    SHARDING_TYPES,
    TABLE_WISE,
    Table,
    UniformReuse,
    Workload,
)
from torchrec_bls.sharding.search.placement import Placement
from torchrec_bls.sharding.search.plan_sets import PlanSets, needless
from torchrec_bls.sharding.search.programme import Programme
from torchrec_bls.sharding.search.step_bound import step_bound

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

EVERY = 1e12


def least_objective(problem: Problem, capacity: float = np.inf) -> float:
    """Returns the least objective of all plans within the memory; infinity without one."""
    return min(
        (each.cost for each in all_placements(problem) if each.memory.max() <= capacity),
        default=np.inf,
    )


def all_placements(problem: Problem) -> Iterator[Placement]:
    """Yields all plans."""
    job = problem.job
    ways = []
    for table in range(len(problem.tables)):
        placed = []
        for number in np.flatnonzero(problem.option_table == table).tolist():
            option = problem.options[number]
            if option.spread == ANY_RANKS:
                ranks = list(combinations(range(job.ranks), option.shards))
            elif option.spread == ALL_RANKS:
                ranks = [tuple(range(job.ranks))]
            else:
                hosts = range(0, job.ranks, job.host_ranks)
                ranks = [tuple(range(at, at + job.host_ranks)) for at in hosts]
            placed += [(number, np.array(each)) for each in ranks]
        ways.append(placed)
    everywhere = np.full(job.ranks, np.inf), np.ones(len(problem.imbalance))
    for plan in product(*ways):
        chosen = [problem.options[option] for option, _ in plan]
        widths = {(problem.tables[o.table].module, o.group) for o in chosen if "/" in o.group}
        if len(widths) > len({module for module, _ in widths}):
            continue
        placement = Placement(problem, *everywhere)
        for option, ranks in plan:
            placement.put(option, ranks)
        yield placement


def pairs_of(placement: Placement) -> np.ndarray:
    """Returns which pairs of module and group a plan uses, (pairs)."""
    problem = placement.problem
    used = problem.op_pair[problem.option_op[placement.option]]
    return np.asarray(np.bincount(used, minlength=len(problem.charges)) > 0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Tables of up to three modules, few enough to try all plans."""
    ranks, hosts = draw(st.sampled_from([(2, 1), (3, 1), (4, 2)]))
    tables, reuse = [], {}
    for index in range(draw(st.integers(1, 3))):
        module = draw(st.sampled_from(["bags", "rows", "others"]))
        types = draw(st.sets(st.sampled_from(SHARDING_TYPES), min_size=1))
        table = Table(
            f"t{index}",
            rows=draw(st.integers(100, 5000)),
            dim=64,
            module=module,
            pooled=module == "bags",
            weight_bytes=draw(st.sampled_from([4, 2])),
            sharding_types=tuple(sorted(types)),
            min_columns=32,
        )
        tables.append(table)
        reuse[table.path] = UniformReuse(table.rows, draw(st.floats(0.1, 30)))
    training = draw(st.booleans())
    job = Job(
        ranks,
        draw(st.sampled_from([4, 64])),
        [1 << 40] * ranks,
        ranks_per_host=ranks // hosts,
        backend=draw(st.sampled_from(["gloo", "nccl", "bls"])),
        bound=0 if training else draw(st.integers(0, 1)),
        training=training,
        cores_per_host=draw(st.sampled_from([None, 1, 2])),
    )
    costs = AdditiveTestCosts(draw(st.sampled_from([0.0, 0.4, 1.0])))
    costs.op_us = draw(st.sampled_from([0.0, 20.0, 300.0]))
    return make_problem(Workload(tables, reuse), job, costs)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(problems(), st.floats(0.5, 1.1))
def test_no_plan_is_below_the_bound(problem: Problem, part: float) -> None:
    best = least_objective(problem)
    roomy_bound = step_bound(problem, np.full(problem.job.ranks, EVERY), 10 * best)
    assert 0 < roomy_bound <= best * (1 + 1e-9)
    # With just so much memory that some plans do not fit.
    largest = problem.memory.max() * part * len(problem.tables)
    scarce = least_objective(problem, largest)
    known = min(10 * best, scarce)
    bound = step_bound(problem, np.full(problem.job.ranks, largest), known)
    assert bound <= scarce * (1 + 1e-9)


def test_a_bound_is_never_above_the_plan_that_is_known() -> None:
    problem = make_problem(random_workload(0, 3), roomy(2), AdditiveTestCosts())
    assert step_bound(problem, np.full(2, EVERY), 1.0) == 1.0


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_large_table_more_than_ranks_takes_twice_as_long(ranks: int) -> None:
    """The mean says (ranks + 1) / ranks; in fact a rank has two tables."""
    tables = [Table(f"t{i}", 5000, 64, sharding_types=(TABLE_WISE,)) for i in range(ranks + 1)]
    reuse = {table.name: UniformReuse(5000, 10.0) for table in tables}
    costs = AdditiveTestCosts()
    problem = make_problem(Workload(tables, reuse), roomy(ranks), costs)
    best = least_objective(problem)
    bound = step_bound(problem, np.full(ranks, EVERY), 10 * best)
    assert 0.999 * best <= bound <= best * (1 + 1e-9)


def test_tables_on_all_ranks_leave_less_room_for_the_others() -> None:
    """Rows of an unpooled module are everywhere, and a pooled table comes on top of them."""
    tables = [
        Table("rows", 5000, 64, "ec", pooled=False, sharding_types=(ROW_WISE,)),
        Table("whole", 5000, 64, "ebc", sharding_types=(TABLE_WISE,)),
    ]
    reuse = {table.path: UniformReuse(5000, 10.0) for table in tables}
    problem = make_problem(Workload(tables, reuse), roomy(4), AdditiveTestCosts())
    best = least_objective(problem)
    assert step_bound(problem, np.full(4, EVERY), 10 * best) >= 0.999 * best


def test_the_set_of_each_plan_is_found_the_least_bound_first() -> None:
    drawn = random_workload(4, 3, modules=2)
    tables = [replace(table, pooled=table.module == "m0", dim=64) for table in drawn.tables]
    problem = make_problem(Workload(tables, drawn.reuse), roomy(4), AdditiveTestCosts())
    capacity, every = np.full(4, EVERY), np.ones(len(problem.options), bool)
    sets = PlanSets(problem, Programme(problem, capacity), capacity, every)
    found = list(sets)
    assert sets.unsolved == np.inf
    bounds = [plans.solution.bound for plans in found]
    assert bounds == sorted(bounds)
    # Three types of a module; of the other one table-wise, row-wise, and one width of three or
    # none.
    assert len(found) == 7 * (4 * 4 - 1)
    by_pairs = {plans.required.tobytes(): plans for plans in found}
    assert len(by_pairs) == len(found)
    for placement in all_placements(problem):
        plans = by_pairs[pairs_of(placement).tobytes()]
        assert plans.options[placement.option].all()
        assert plans.solution.bound <= placement.cost * (1 + 1e-9)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(problems())
def test_what_is_needless_is_in_no_plan_that_is_better_than_all_others(problem: Problem) -> None:
    without = ~needless(problem)
    best = min(each.cost for each in all_placements(problem) if without[each.option].all())
    assert best <= least_objective(problem) * (1 + 1e-9)


def test_what_fits_nowhere_has_no_sets() -> None:
    problem = make_problem(random_workload(0, 2, (COLUMN_WISE,)), roomy(2), AdditiveTestCosts())
    capacity = np.full(2, EVERY)
    none = np.zeros(len(problem.options), bool)
    assert not list(PlanSets(problem, Programme(problem, capacity), capacity, none))
