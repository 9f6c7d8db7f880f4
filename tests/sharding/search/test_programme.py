"""The programme against all plans, whatever multipliers the solver found."""

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
from torchrec_bls.sharding.search import programme
from torchrec_bls.sharding.search.placement import Placement
from torchrec_bls.sharding.search.programme import Programme, Solution, relaxed_choice
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.search.step_bound import step_bound

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy
from tests.sharding.search.test_step_bound import EVERY, all_placements, pairs_of, problems


def solved(problem: Problem, required: np.ndarray | None = None) -> Solution | None:
    """Returns the solution of all plans, or of those that use all required pairs and no others."""
    every = np.ones(len(problem.charges), bool)
    possible = every if required is None else required
    options = possible[problem.op_pair[problem.option_op]]
    programme = Programme(problem, np.full(problem.job.ranks, EVERY))
    return programme.solved(options, ~every if required is None else required, possible)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(problems(), st.integers(0, 2**32), st.booleans())
def test_no_plan_is_below_what_any_multipliers_prove(
    problem: Problem, seed: int, by_solver: bool
) -> None:
    plans = [(pairs_of(placement), placement) for placement in all_placements(problem)]
    _, drawn = plans[seed % len(plans)]
    with pytest.MonkeyPatch.context() as patch:
        if not by_solver:
            patch.setattr(programme, "linprog", lambda *_, **of: any_solution(seed, **of))
        every, some = solved(problem), solved(problem, pairs_of(drawn))
    assert every is not None and some is not None
    for pairs, placement in plans:
        cost = placement.cost * (1 + 1e-9) + 1e-6
        assert np.all(every.bound + every.excess[placement.option] <= cost)
        if (pairs == pairs_of(drawn)).all():
            assert np.all(some.bound + some.excess[placement.option] <= cost)


def any_solution(seed: int, **of: object) -> SimpleNamespace:
    random = np.random.default_rng(seed)
    rows, columns = of["A_ub"].shape  # type: ignore[attr-defined]
    multipliers = random.uniform(0, 1, rows) * (random.uniform(0, 1, rows) < 0.7)
    return SimpleNamespace(
        status=0,
        x=np.zeros(columns),
        ineqlin=SimpleNamespace(marginals=-multipliers),
        eqlin=SimpleNamespace(marginals=random.uniform(0, 500, of["A_eq"].shape[0])),  # type: ignore[attr-defined]
    )


def two_tables() -> Problem:
    """Of one phase: `fixed` is table-wise alone, `free` table-wise or row-wise, on 2 ranks."""
    tables = [
        Table("fixed", 1000, 64, sharding_types=(TABLE_WISE,)),
        Table("free", 1000, 64, sharding_types=(TABLE_WISE, ROW_WISE)),
    ]
    workload = Workload(tables, {t.path: UniformReuse(1000, 1.0) for t in tables})
    problem = make_problem(workload, roomy(2, training=False, bound=1), AdditiveTestCosts())
    of_options = np.array([[10.0], [8.0], [3.0]])
    return without_constants(replace(problem, costs=of_options, shared=of_options))


def without_constants(problem: Problem) -> Problem:
    nothing = {"op_us": 0.0 * problem.op_us, "charges": 0.0 * problem.charges}
    return replace(problem, **nothing)


def test_shards_beside_what_is_on_all_ranks_by_hand() -> None:
    found = solved(two_tables())
    assert found is not None
    # With a part p of `free` row-wise a rank has at least 10 + 3 p, or (10 + 8 (1 - p)) / 2 + 3 p.
    assert found.bound == pytest.approx(10.0)
    # All of it row-wise is 13.
    assert found.excess[2] == pytest.approx(3.0)
    assert found.shares == pytest.approx([1.0, 1.0, 0.0])
    assert (found.longest[0], found.on_all[0]) == pytest.approx((10.0, 0.0))


def test_constants_beside_shards_by_hand() -> None:
    """Charges of 5 and 7, ops of 1 and 2 microseconds: table-wise alone, and with row-wise."""
    problem = two_tables()
    ops = np.array([[1.0], [2.0]])
    problem = replace(problem, charges=np.array([5.0, 7.0]), op_us=ops)
    alone, both = solved(problem, np.array([True, False])), solved(problem, np.ones(2, bool))
    assert alone is not None and both is not None
    # The rank with `fixed` has its op, too.
    assert alone.bound == pytest.approx(5 + 10 + 1)
    # The op of rows is on every rank, whoever has shards.
    assert both.bound == pytest.approx(12 + 10 + 1 + 2)


def test_choice_is_that_of_the_best_plan() -> None:
    """A start for the search: its options could do as well as any, were shards spread evenly."""
    workload = random_workload(3, 6)
    problem = without_constants(make_problem(workload, roomy(2), AdditiveTestCosts()))
    every, pairs = np.ones(len(problem.options), bool), np.ones(len(problem.charges), bool)
    chosen = relaxed_choice(Programme(problem, np.full(2, EVERY)), problem, every, pairs)
    relaxed = solved(problem)
    assert chosen is not None and relaxed is not None
    assert problem.option_table[chosen].tolist() == list(range(6))
    even = problem.option_shards[chosen] @ problem.costs[chosen] / 2
    assert relaxed.bound * (1 - 1e-9) <= even.sum() <= 1.05 * relaxed.bound


def test_without_a_solution_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_tables()
    monkeypatch.setattr(programme, "linprog", lambda *_, **__: SimpleNamespace(status=4))
    assert solved(problem) is None
    every, pairs = np.ones(3, bool), np.ones(2, bool)
    assert relaxed_choice(Programme(problem, np.full(2, EVERY)), problem, every, pairs) is None
    assert step_bound(problem, np.full(2, EVERY), 100.0) == 0.0
    # Plans are sought all the same: `fixed` and `free` on a rank each.
    assert search(problem).objective == pytest.approx(10.0)


def test_a_placement_is_rescaled_to_its_slowest_ranks() -> None:
    problem = two_tables()
    placement = Placement(problem, np.full(2, EVERY), np.ones(1))
    placement.put(0, np.array([1]))
    placement.rescale()
    assert placement.scale.tolist() == [[10.0]]
