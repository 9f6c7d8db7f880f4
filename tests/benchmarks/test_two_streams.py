"""Algorithm 1 against steps worked out by hand, line by line."""

import pytest

from benchmarks.simulator.two_streams import Op, Overheads, Prediction, algorithm_1

HOST = Overheads(t1=1, t2=2, t3=3, t4=4, t5=5)
FREE = Overheads()


@pytest.mark.parametrize(
    ("ops", "total", "active"),
    [
        pytest.param([], 0, 0, id="nothing"),
        # Host 1 + 2 = 3; the kernel starts at 3 + 4 / 2.
        pytest.param([Op(HOST, (10,))], 15, 10, id="a kernel"),
        # The second one: host 3 + 4 + 5 = 12, stream 15 + 1.
        pytest.param([Op(HOST, (10, 20))], 36, 30, id="the stream is behind"),
        # Host 12 at the second launch, which begins at 12 + 2: later than 5.5 + 1.
        pytest.param([Op(HOST, (0.5, 20))], 34, 20.5, id="the host is behind"),
        pytest.param([Op(HOST)], 6, 0, id="an op without kernels has T1 and T5"),
        # Host 3 + 100 + 3; the kernel ends at 53 + 10.
        pytest.param([Op(HOST._replace(t4=100), (10,))], 106, 10, id="the host ends last"),
        # Host 1 + 2 + 4 + 3, then 1 + 2: the second kernel starts at 13 + 2, after 6 + 1.
        pytest.param([Op(HOST, (1,)), Op(HOST, (20,))], 35, 21, id="T3 comes before the next op"),
    ],
)
def test_one_rank(ops: list[Op], total: float, active: float) -> None:
    assert algorithm_1([ops]) == Prediction(total, active)


def ranks(depends: bool) -> list[list[Op]]:
    """Kernels of 10 and 30, an exchange of 5, a kernel of 7."""
    return [
        [Op(FREE, (first,)), Op(FREE, (5,), communicates=True), Op(FREE, (7,), depends=depends)]
        for first in (10, 30)
    ]


def test_what_depends_on_a_collective_starts_when_the_last_rank_is_done_with_it() -> None:
    # Rank 1: 1 + 30, its streams together, 32 + 5: the exchange ends there for both. 38 + 7.
    assert algorithm_1(ranks(depends=True)) == Prediction(45, 30 + 5 + 7)


def test_what_does_not_depend_runs_beside_the_collective() -> None:
    # Rank 1: 1 + 30, then 32 + 7 on the compute stream; the exchange ends at 37, so that 2 are new.
    assert algorithm_1(ranks(depends=False)) == Prediction(39, 30 + 5 + 2)


def test_a_collective_starts_after_all_kernels_before_it() -> None:
    first, second = Op(FREE, (50,), communicates=True), Op(FREE, (1,), communicates=True)
    # 1 + 50, the kernel 1 + 9 beside it; the second exchange at 51 + 1.
    assert algorithm_1([[first, Op(FREE, (9,)), second]]) == Prediction(53, 51)
    # The kernel ends at 1 + 90, 40 of them behind 51: the second exchange is at 91 + 1.
    assert algorithm_1([[first, Op(FREE, (90,)), second]]) == Prediction(93, 50 + 40 + 1)


def test_only_the_first_op_that_depends_waits() -> None:
    exchange = Op(FREE, (50,), communicates=True)
    reads = Op(FREE, (5,), depends=True)
    # 51; 52 + 5; 58 + 5: the second is behind the first, on one stream.
    assert algorithm_1([[exchange, reads, reads]]).total_us == 63


def test_the_slowest_host_counts() -> None:
    slow = [Op(HOST._replace(t5=1000))]
    assert algorithm_1([[Op(HOST)], slow]).total_us == 1001


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="there are no ranks"):
        algorithm_1([])
    with pytest.raises(ValueError, match=r"ranks have \[1, 0\] collectives"):
        algorithm_1([[Op(FREE, (1,), communicates=True)], [Op(FREE, (1,))]])
