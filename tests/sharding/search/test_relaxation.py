"""The relaxation against the best of all plans, whatever multipliers the solver found."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.problem.options import Problem, make_problem
from torchrec_bls.sharding.problem.tables import (
    ROW_WISE,
    TABLE_WISE,
    Table,
    UniformReuse,
    Workload,
)
from torchrec_bls.sharding.search import relaxation
from torchrec_bls.sharding.search.placement import Placement
from torchrec_bls.sharding.search.relaxation import Constants, relax, relaxed_choice

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy
from tests.sharding.search.test_step_bound import EVERY, all_placements, problems


def least_with_each_option(problem: Problem) -> np.ndarray:
    """Returns the least objective of the plans with each option, charges apart, (options)."""
    least = np.full(len(problem.options), np.inf)
    for placement in all_placements(problem):
        pairs = np.unique(problem.op_pair[problem.option_op[placement.option]])
        phases = placement.cost - problem.charges[pairs].sum()
        least[placement.option] = np.minimum(least[placement.option], phases)
    return least


@settings(max_examples=60, derandomize=True, deadline=None)
@given(problems(), st.integers(0, 2**32), st.booleans())
def test_no_plan_is_below_what_any_multipliers_prove(
    problem: Problem, seed: int, solved: bool
) -> None:
    every = np.ones(len(problem.options), bool)
    capacity = np.full(problem.job.ranks, EVERY)
    with pytest.MonkeyPatch.context() as patch:
        if not solved:
            patch.setattr(relaxation, "linprog", lambda *_, **of: any_solution(seed, **of))
        relaxed = relax(problem, every, capacity, Constants.none(problem))
    assert relaxed is not None
    least = least_with_each_option(problem)
    # Options that no plan has, by their EmbeddingCollection's width, have infinity.
    assert np.all(relaxed.bound + relaxed.excess <= least * (1 + 1e-9) + 1e-6)
    assert relaxed.bound <= least.min() * (1 + 1e-9) + 1e-6


def any_solution(seed: int, **programme: object) -> SimpleNamespace:
    random = np.random.default_rng(seed)
    rows, columns = programme["A_ub"].shape  # type: ignore[attr-defined]
    multipliers = random.uniform(0, 1, rows) * (random.uniform(0, 1, rows) < 0.7)
    # A full memory's price is per its whole: by far less than a microsecond here.
    multipliers[-1] *= 1e-9
    inequalities = SimpleNamespace(marginals=-multipliers)
    return SimpleNamespace(status=0, x=np.zeros(columns), ineqlin=inequalities)


def two_tables(**costs: list[list[float]]) -> Problem:
    """Of one phase: `fixed` is table-wise alone, `free` table-wise or row-wise, on 2 ranks."""
    tables = [
        Table("fixed", 1000, 64, sharding_types=(TABLE_WISE,)),
        Table("free", 1000, 64, sharding_types=(TABLE_WISE, ROW_WISE)),
    ]
    workload = Workload(tables, {t.path: UniformReuse(1000, 1.0) for t in tables})
    problem = make_problem(workload, roomy(2, training=False, bound=1), AdditiveTestCosts())
    of_options = np.array([[10.0], [8.0], [3.0]])
    return replace(problem, costs=of_options, shared=of_options)


def test_shards_beside_what_is_on_all_ranks_by_hand() -> None:
    problem = two_tables()
    relaxed = relax(problem, np.ones(3, bool), np.full(2, EVERY), Constants.none(problem))
    assert relaxed is not None
    # With a part p of `free` row-wise a rank has at least 10 + 3 p, or (10 + 8 (1 - p)) / 2 + 3 p.
    assert relaxed.bound == pytest.approx(10.0)
    # All of it row-wise is 13.
    assert relaxed.excess[2] == pytest.approx(3.0)
    assert relaxed.shares == pytest.approx([1.0, 1.0, 0.0])
    assert (relaxed.longest[0], relaxed.on_all[0]) == pytest.approx((10.0, 0.0))


def test_choice_is_that_of_the_best_plan() -> None:
    """A start for the search: its options could do as well as any, were shards spread evenly."""
    problem = make_problem(random_workload(3, 6), roomy(2), AdditiveTestCosts())
    every, capacity = np.ones(len(problem.options), bool), np.full(2, EVERY)
    chosen = relaxed_choice(problem, every, capacity)
    relaxed = relax(problem, every, capacity, Constants.none(problem))
    assert chosen is not None and relaxed is not None
    assert problem.option_table[chosen].tolist() == list(range(6))
    even = problem.option_shards[chosen] @ problem.costs[chosen] / 2
    assert relaxed.bound * (1 - 1e-9) <= even.sum() <= 1.05 * relaxed.bound


def test_without_a_solution_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_tables()
    monkeypatch.setattr(relaxation, "linprog", lambda *_, **__: SimpleNamespace(status=4))
    every, capacity = np.ones(3, bool), np.full(2, EVERY)
    assert relax(problem, every, capacity, Constants.none(problem)) is None
    assert relaxed_choice(problem, every, capacity) is None


def test_a_placement_is_rescaled_to_its_slowest_ranks() -> None:
    problem = two_tables()
    placement = Placement(problem, np.full(2, EVERY), np.ones(1))
    placement.put(0, np.array([1]))
    placement.rescale()
    assert placement.scale.tolist() == [[10.0]]
