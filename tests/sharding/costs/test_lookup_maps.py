import dataclasses

import numpy as np
import pytest
from torchrec_bls.sharding.cost_interface import LookupWork, Ops
from torchrec_bls.sharding.costs.fitting.accuracy import gmae_percent
from torchrec_bls.sharding.costs.fitting.lookups import fit_lookup, samples_of
from torchrec_bls.sharding.costs.lookup.features import as_columns
from torchrec_bls.sharding.costs.lookup.hash_maps import MAP_TERMS, map_terms
from torchrec_bls.sharding.costs.lookup.model import LookupRecord
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.tables import (
    TABLE_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    UniformReuse,
    Workload,
)
from torchrec_bls.sharding.report.plan_report import make_report
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.search.search import search

from tests.sharding.synthetic import (
    measured_ops,
    planted_model,
    random_works,
    read_back,
    small_profile,
)

MODEL = planted_model(shard=5.0, lookup=0.01, map_id=0.4, map_id_far=1.5)
COSTS = ProfiledCosts(
    dataclasses.replace(
        small_profile(), lookups=small_profile().lookups | {(False, "backward"): MODEL}
    )
)


def _work(rows: int, unique_rows: float) -> LookupWork:
    return LookupWork(
        rows=rows,
        dim=16,
        weight_bytes=4,
        samples=100,
        pooling=20.0,
        unique_rows=unique_rows,
        pooled=False,
    )


def _terms(works: list[LookupWork], ops: Ops) -> dict[str, list[float]]:
    terms = map_terms(as_columns(works), ops)
    return dict(zip(MAP_TERMS, terms.T.tolist(), strict=True))


def test_maps_of_two_tables_by_hand() -> None:
    works = [_work(200, 100), _work(100, 50)]
    # Ids below 100: a quarter is in neither table. From 100 to 199: half are in the larger one.
    ids = 75 + 50
    map_bytes = 400 * ids + 150 * (88 + 64)
    far = np.log2(1 + map_bytes / 2**24) ** 2
    assert _terms(works, Ops.together(2)) == pytest.approx(
        {
            "map_id": pytest.approx([ids * 2 / 3, ids / 3]),
            "map_id_far": pytest.approx([ids * 2 / 3 * far, ids / 3 * far]),
        }
    )
    assert _terms(works, Ops.alone(2))["map_id"] == pytest.approx([100, 50])


def test_two_tables_of_which_each_rank_has_one() -> None:
    works = [_work(100, 50), _work(100, 50)]
    halves = Ops(np.zeros(2, dtype=np.int64), np.array([0.5, 0.5]))
    assert _terms(works, halves)["map_id"] == pytest.approx([50, 50])


def test_a_shard_without_lookups_has_nothing_in_the_maps() -> None:
    terms = map_terms(as_columns([_work(100, 0.0)]), Ops.together(1))
    assert not terms.any()


def test_distinct_ids_of_real_draws() -> None:
    random = np.random.default_rng(0)
    tables = [(1000, 700), (5000, 800), (5000, 4500), (40_000, 9000)]
    drawn = [random.choice(rows, unique, replace=False) for rows, unique in tables]
    truth = len(np.unique(np.concatenate(drawn)))
    works = [_work(rows, unique) for rows, unique in tables]
    assert sum(_terms(works, Ops.together(4))["map_id"]) == pytest.approx(truth, rel=0.02)


def test_a_fit_recovers_planted_maps() -> None:
    model = fit_lookup(measured_ops(MODEL, 150, noise=0.02))
    unseen = measured_ops(MODEL, 100, noise=0.0, seed=1)
    assert model.shares_maps
    assert gmae_percent(unseen.predicted_us(model), unseen.measured_us) < 4.0
    again = read_back(model.as_json(), LookupRecord).model()
    assert np.array_equal(unseen.predicted_us(again), unseen.predicted_us(model))


def test_only_the_backward_of_unpooled_lookups_has_maps() -> None:
    record = {
        "configuration": {
            "tables": [{"rows": 100, "dim": 8, "pooling": 2.0, "skew": 0.0}],
            "samples": 10,
            "weight_bytes": 4,
            "pooled": False,
            "seed": 0,
        },
        "lookups": [20],
        "unique_rows": [10],
        "reuse_factors": [[1.0]],
        "forward_us": [1.0],
        "backward_us": [2.0],
    }
    pooled = {**record, "configuration": {**record["configuration"], "pooled": True}}  # type: ignore[dict-item]
    for direction, its_record, expected in (
        ("backward", record, True),
        ("forward", record, False),
        ("backward", pooled, False),
    ):
        samples = samples_of([its_record], direction, its_record is pooled, "tenth percentile")
        assert samples.share_maps is expected
        assert samples.take(np.array([0])).share_maps is expected


def test_marginals_of_one_op_add_up_to_it() -> None:
    works = [
        dataclasses.replace(work, dim=16)
        for work in random_works(np.random.default_rng(3), 8, pooled=False)
    ]
    together = COSTS.marginal_backward(works, Ops.together(8))
    whole = COSTS.lookup_backward(works).microseconds
    assert together.sum() + MODEL.op_us == pytest.approx(whole)
    alone = [COSTS.lookup_backward([work]).microseconds - MODEL.op_us for work in works]
    assert COSTS.marginal_backward(works) == pytest.approx(alone)
    assert abs(sum(alone) / together.sum() - 1) > 0.1, "these shards hardly share anything"


def test_the_search_prices_a_shard_as_on_a_rank_with_its_share_of_the_tables() -> None:
    ranks, per_rank = 2, 4
    tables = [
        Table(f"t{i}", 50_000, 16, "m", pooled=False, sharding_types=(TABLE_WISE,))
        for i in range(ranks * per_rank)
    ]
    workload = Workload(tables, {t.path: UniformReuse(t.rows, 40.0) for t in tables})
    job = Job(ranks, 512, [1 << 40] * ranks, backend="gloo")
    problem = make_problem(workload, job, COSTS)
    plan = [
        PlacedTable(table, TABLE_WISE, (PlacedShard(i % ranks, table.rows, table.dim),))
        for i, table in enumerate(tables)
    ]
    rated = rate(plan, workload, job, COSTS).ranks[0].backward.microseconds
    backward = problem.costs[:, -1]
    assert problem.op_us[0, -1] == pytest.approx(MODEL.op_us)
    assert MODEL.op_us + per_rank * backward[0] == pytest.approx(rated)
    alone = COSTS.marginal_backward([problem.traffic[0].lookup])[0]
    assert abs(alone / backward[0] - 1) > 0.1, "these shards hardly share anything"


def test_the_report_says_where_the_search_counted_otherwise() -> None:
    random = np.random.default_rng(2)
    tables = [
        Table(f"t{i}", int(rows), 16, "m", pooled=False, sharding_types=(TABLE_WISE,))
        for i, rows in enumerate(random.uniform(1e3, 1e5, 7))
    ]
    workload = Workload(tables, {t.path: UniformReuse(t.rows, 20.0) for t in tables})
    job = Job(3, 512, [1 << 40] * 3, backend="gloo")
    report = make_report(workload, search(make_problem(workload, job, COSTS)), COSTS)
    words = f"The search counted {report.objective_us:,.0f} us for this plan"
    assert words in " ".join(report.as_text().split())
    assert words in report.as_html()
    same = dataclasses.replace(report, objective_us=report.rating.step.microseconds)
    assert "The search counted" not in same.as_text() + same.as_html()
